"""How are facts read out of somebody's pickle, and nothing run? By names that stand for facts.

vLLM's trainers pickle two things: a communicator's id, and handles of memory on a GPU. A pickle
calls whatever it names; so each reader says which names it knows, what they stand for here, and
every other is refused before anything is looked up or imported. It knows neither thing.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

from tidegate.errors import TidegateError

PICKLE_BYTES_MAX = 64 * 2**20
"""Handles of a hundred thousand tensors are less."""


class NotFacts(TidegateError):
    """A pickle holds something else than the facts it was read for."""


class _Facts(pickle.Unpickler):
    def __init__(self, data: bytes, named: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._named = named

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._named(module, name)
        if found is None:
            raise NotFacts(f"it names {module}.{name}, which is not read")
        return found

    def persistent_load(self, pid: Any, /) -> Any:
        raise NotFacts("it refers to what is elsewhere")


def read_facts(data: bytes, named: Callable[[str, str], Any]) -> Any:
    """What is pickled in ``data``, where ``named`` says what a module's name stands for.

    What it gives back may be called with whatever is in the pickle: give back nothing that does
    more than to make a value of it. None refuses the name.

    Raises:
        NotFacts: it names something else, or can't be read.
    """
    if len(data) > PICKLE_BYTES_MAX:
        raise NotFacts(f"it has {len(data)} bytes, {PICKLE_BYTES_MAX} at most are read")
    try:
        return _Facts(data, named).load()
    except NotFacts:
        raise
    except Exception as error:  # noqa: BLE001 - bytes of a stranger: whatever they cause, they caused
        raise NotFacts(f"it can't be read: {error!r}") from None
