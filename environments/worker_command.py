"""Command line and environment variables of a worker process, which may use another Python.

Called by :mod:`started_worker`. Variables that hold secrets are left out.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path

from tidegate.transport import server_keys

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib"))
"""Library directories of this Python, which another Python must not get: it has its own."""

KEYS = (
    server_keys.VARIABLE,
    server_keys.FILE_VARIABLE,
    server_keys.OWN_KEY_VARIABLE,
    f"{server_keys.OWN_KEY_VARIABLE}_FILE",
    server_keys.CONTROL_TOKEN_VARIABLE,
    f"{server_keys.CONTROL_TOKEN_VARIABLE}_FILE",
    server_keys.DASHBOARD_TOKEN_VARIABLE,
)
"""Variables that hold keys of engine servers, our server and the dashboard; never passed on."""


def worker_command(python: str, descriptor: int, memory_bytes: int | None) -> list[str]:
    """Return the command line of a worker that communicates through the socket ``descriptor``."""
    module = "tidegate.environments.worker"
    command = [python, "-X", "faulthandler", "-m", module]
    command += ["--socket", str(descriptor), "--parent", str(os.getpid())]
    return command if memory_bytes is None else [*command, "--memory-bytes", str(memory_bytes)]


SECRET_NAMES = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH)S?(_|$)"
    r"|(^|_)(PASS|PAT|COOKIE|DSN)(_|$)",
    re.IGNORECASE,
)
"""Names of variables that may hold secrets: ``HF_TOKEN``, ``AWS_ACCESS_KEY_ID``,
``SSH_AUTH_SOCK``."""

SECRET_VALUES = re.compile(r"://[^/@\s]+:[^/@\s]+@")
"""Values with a password in a URL: ``postgres://user:password@host/``."""


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable's name or value looks like a secret."""
    return bool(SECRET_NAMES.search(name) or SECRET_VALUES.search(value))


def child_environment(pass_variables: Collection[str] = ()) -> dict[str, str]:
    """Return the environment variables of a worker process.

    Code written by a model may run there. So variables that look like secrets are left out, except
    for names in ``pass_variables``; :data:`KEYS` are always left out. PYTHONPATH has this process's
    module path without installed packages, because the worker may use another Python.
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
