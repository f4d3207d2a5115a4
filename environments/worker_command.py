"""By which command line and variables is a worker started, perhaps in another Python than this one?

It knows nothing of what the worker then does.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

from tidegate.transport import server_keys

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
"""What another Python must not be given: it has its own."""

KEYS = (
    server_keys.VARIABLE,
    server_keys.FILE_VARIABLE,
    server_keys.OWN_KEY_VARIABLE,
    f"{server_keys.OWN_KEY_VARIABLE}_FILE",
    server_keys.CONTROL_TOKEN_VARIABLE,
    f"{server_keys.CONTROL_TOKEN_VARIABLE}_FILE",
    server_keys.DASHBOARD_TOKEN_VARIABLE,
)
"""Variables that hold keys: of engines' servers, of our own server, and of the dashboard."""


def worker_command(python: str, descriptor: int, memory_bytes: int | None) -> list[str]:
    """The command line of a worker that is spoken to through a descriptor."""
    module = "tidegate.environments.worker"
    command = [python, "-X", "faulthandler", "-m", module]
    command += ["--socket", str(descriptor), "--parent", str(os.getpid())]
    return command if memory_bytes is None else [*command, "--memory-bytes", str(memory_bytes)]


SECRET_NAMES = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH)S?(_|$)"
    r"|(^|_)(PASS|PAT|COOKIE|DSN)(_|$)",
    re.IGNORECASE,
)
"""Names of variables that hold secrets: ``HF_TOKEN``, ``AWS_ACCESS_KEY_ID``, ``SSH_AUTH_SOCK``."""

SECRET_VALUES = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""Values with a password: ``postgres://user:password@host/``."""


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable looks as if it held a secret."""
    return bool(SECRET_NAMES.search(name) or SECRET_VALUES.search(value))


def child_environment(pass_variables: Collection[str] = ()) -> dict[str, str]:
    """The variables of a process of environments.

    Code that models write may run there, so variables that look like secrets are left out, but for
    the names in ``pass_variables``; the run's own keys are left out always. The process finds
    modules as this one does, but for those that are installed: it may be another Python.
    """
    places = [str(Path(place or ".").absolute()) for place in sys.path]
    ours = [p for p in places if not p.startswith(INSTALLED) and not p.endswith(".zip")]
    before = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(ours)), "PYTHONUNBUFFERED": "1"}
    theirs = {
        name: value
        for name, value in os.environ.items()
        if name not in KEYS and (name in pass_variables or not holds_secret(name, value))
    }
    return {**before, **theirs, **own}
