"""By which command line and variables is a worker started, perhaps in another Python than this one?

It knows nothing of what the worker then does.
"""

import os
import sys
import sysconfig
from pathlib import Path

from tidegate.orchestrator.observing.access import TOKEN_VARIABLE
from tidegate.transport import server_keys

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
"""What another Python must not be given: it has its own."""

KEYS = (server_keys.VARIABLE, server_keys.FILE_VARIABLE, TOKEN_VARIABLE)
"""Of engines' servers, and of the dashboard."""


def worker_command(python: str, descriptor: int, memory_bytes: int | None) -> list[str]:
    """The command line of a worker that is spoken to through a descriptor."""
    module = "tidegate.orchestrator.environments.worker"
    command = [python, "-X", "faulthandler", "-m", module]
    command += ["--socket", str(descriptor), "--parent", str(os.getpid())]
    return command if memory_bytes is None else [*command, "--memory-bytes", str(memory_bytes)]


def child_environment() -> dict[str, str]:
    """The variables of a process that finds modules as this one does, but for those that are
    installed: it may be another Python, and have its own. Nor has it the run's keys: what models
    write may run there."""
    places = [str(Path(place or ".").absolute()) for place in sys.path]
    ours = [p for p in places if not p.startswith(INSTALLED) and not p.endswith(".zip")]
    before = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(ours)), "PYTHONUNBUFFERED": "1"}
    theirs = {name: value for name, value in os.environ.items() if name not in KEYS}
    return {**before, **theirs, **own}
