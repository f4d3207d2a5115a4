"""Types of the pytest fixtures for users' tests, to annotate test arguments; see docs/testing.md.

Names are imported lazily (PEP 562), because pytest loads the fixtures' plugin in every test run.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.simulation.engine.scripted import ScriptedEngine, TurnRequest
    from tidegate.simulation.run.serve import ServeInTests
    from tidegate.simulation.run.virtual_time import VirtualTime

__all__ = ["ScriptedEngine", "ServeInTests", "TurnRequest", "VirtualTime"]

_HOMES = {
    "ScriptedEngine": "engine.scripted",
    "ServeInTests": "run.serve",
    "TurnRequest": "engine.scripted",
    "VirtualTime": "run.virtual_time",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidegate.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tidegate.simulation.{_HOMES[name]}"), name)
