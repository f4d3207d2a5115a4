"""Program that prints what a process can tell of itself, as JSON, and ends with status 3.

``test_forked_programs.py`` compares what it prints after a fork and after an exec.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> int:
    """Print the description, and what standard input has."""
    umask = os.umask(0)
    os.umask(umask)
    shown = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "name": __name__,
        "path": sys.path,
        "environ": dict(os.environ),
        "cwd": str(Path.cwd()),
        "umask": umask,
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "signals": {name: repr(signal.getsignal(number)) for name, number in _SIGNALS.items()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if _is_open(int(fd))),
        "has torch": "torch" in sys.modules,
        "threads": [thread.name for thread in threading.enumerate()],
        "command line": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "stdin": sys.stdin.read(),
        "stdout": [sys.stdout.encoding, sys.stdout.line_buffering],
    }
    sys.stdout.write(json.dumps(shown))
    sys.stderr.write("an error\n")
    return 3


_SIGNALS = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGCHLD")}


def _is_open(fd: int) -> bool:
    """Return whether a descriptor is open after it was listed: the list's own is not."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
