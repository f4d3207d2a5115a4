"""Start of several engines from one process that has imported torch.

An engine's imports take 1.2 s of CPU time, which a fork does not repeat. `orchestrator/fleet` runs
this program with a JSON list of the engines' ``[command, log]`` as its argument, and reads a JSON
list of their PIDs. It then makes itself a child subreaper (``prctl(2)``) and writes a line to the
standard input, upon which this program ends and the engines begin, as children of the caller. Until
then they end with this program.
"""

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from tidegate.engine import worker
from tidegate.transport.printable import print_stderr

ADOPTION_POLL_S = 0.001
"""Time between looks whether this program, which is about to end, has ended."""


def main() -> int:
    """Fork the engines, and end when the caller has their PIDs.

    Returns 1, with nothing started, if the imports have started threads: such a process can't be
    forked.
    """
    starts: list[tuple[list[str], str]] = json.loads(sys.argv[1])
    if len(os.listdir("/proc/self/task")) > 1:
        print_stderr("the imports of an engine have started threads")
        return 1
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all these objects
    begin, allow = os.pipe()
    program = os.getpid()
    pids = []
    for command, log in starts:
        if (pid := os.fork()) == 0:
            os.close(allow)
            _run(command, Path(log), begin, program)
        pids.append(pid)
    os.write(sys.stdout.fileno(), f"{json.dumps(pids)}\n".encode())
    may_begin = sys.stdin.readline() == "\n"
    if may_begin:
        os.write(allow, b"." * len(pids))
    os._exit(not may_begin)  # the caller waits, and taking all modules apart takes long


def _run(command: list[str], log: Path, begin: int, program: int) -> NoReturn:
    """Run the engine ``python -m tidegate.engine.worker …`` as soon as it may begin, when the
    process ``program`` that has forked it is gone: perhaps before this is called."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, log.open("ab") as output:
        for number, stream in enumerate((nothing, output, output)):
            os.dup2(stream.fileno(), number)
    may_begin = os.read(begin, 1)
    os.close(begin)
    if not may_begin:
        os._exit(worker.ENDED)
    while os.getppid() == program:
        time.sleep(ADOPTION_POLL_S)
    show_command(command)
    sys.argv = command[2:]
    sys.exit(worker.main(command[3:]))


def show_command(command: list[str]) -> None:
    """Show a command in ``/proc/self/cmdline``, where ``tidegate drain`` and ``ps`` look for it, as
    far as there is room: at least for those of :func:`main`'s argument."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    begin, end = map(int, stat.rpartition(")")[2].split()[45:47])
    arguments = b"".join(os.fsencode(each) + b"\0" for each in command)[: end - begin]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, arguments, len(arguments))


if __name__ == "__main__":
    sys.exit(main())
