"""When does each step of an engine begin, by four clocks? A worker that notes it for later.

``python -m benchmarks.engine.watched_worker FILE ARGUMENT...`` is ``tidegate.engine.worker
ARGUMENT...``, and leaves in FILE a JSON list of :class:`Mark`, one for each step. It knows of
compiled functions and of torch's products; of nothing else that a step calls.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tidegate.kernels import compiled

IDLE_CALLS = 2000
"""A millisecond or two, for a mean."""


class Mark(NamedTuple):
    """The beginning of a step, all in ns; what lies between two is a step, messages and all."""

    at: int
    """By the monotonic clock of this machine, which the driver reads, too."""
    cpu: int
    """CPU time of the thread that steps."""
    unserved: int
    """How long that thread has been ready to run, and none of the machine's cores was its."""
    kernels: int
    """Of ``cpu``, what went by in compiled functions and torch's products, in steps so timed."""
    is_timed: bool
    """Whether the step that begins is: every other one, for timing takes time."""
    rows: int
    tokens: int


class Watch:
    """Times what kernels take, and the calls of them, by CPU time of the thread that calls."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._kernels_ns = 0
        self._is_timed = False
        self._look_ns = _look_ns()
        self._served: int | None = None

    def timed(self, compute: Callable[..., Any], idle_ns: int = 0) -> Callable[..., Any]:
        """As ``compute``; ``idle_ns`` is what a call takes that computes nothing."""
        less_ns = self._look_ns + idle_ns

        def call(*args: Any) -> Any:
            if not self._is_timed:
                return compute(*args)
            began_ns = time.thread_time_ns()
            result = compute(*args)
            self._kernels_ns += time.thread_time_ns() - began_ns - less_ns
            return result

        return call

    def mark(self, rows: Sequence[Any]) -> None:
        """A step of these rows begins."""
        if self._served is None:
            self._served = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        unserved = int(os.pread(self._served, 100, 0).split()[1])
        tokens = sum(len(row.token_ids) for row in rows)
        self._is_timed = not self._is_timed
        clocks = time.monotonic_ns(), time.thread_time_ns(), unserved
        self.marks.append(Mark(*clocks, self._kernels_ns, self._is_timed, len(rows), tokens))


def _look_ns() -> int:
    """What a look at the clock takes, and so lies between two."""
    looks = [time.thread_time_ns() for _ in range(IDLE_CALLS)]
    return (looks[-1] - looks[0]) // IDLE_CALLS


def _idle_ns(arguments: Sequence[Any]) -> int:
    """What a call of a function with such arguments takes that does nothing: libc's ``labs``."""
    idle = ctypes.CFUNCTYPE(compiled.INT, *arguments)(("labs", ctypes.CDLL(None)))
    given = [1.0 if one is compiled.FLOAT else 1 for one in arguments]
    began_ns = time.thread_time_ns()
    for _ in range(IDLE_CALLS):
        idle(*given)
    return (time.thread_time_ns() - began_ns) // IDLE_CALLS


def watch_kernels(watch: Watch) -> None:
    """Have every function timed that the modules which take compiled ones ask for from now on."""
    found = compiled.function

    def function(
        functions: ctypes.CDLL,
        name: str,
        arguments: Sequence[Any],
        dtype: torch.dtype | None = None,
    ) -> Callable[..., int]:
        one = found(functions, name, arguments, dtype)
        packs = name.startswith("tg_pack")  # which another thread calls, beside steps
        return one if packs else watch.timed(one, _idle_ns(arguments))

    compiled.function = function


def watch_steps(watch: Watch) -> None:
    """Mark every step; and time torch's products."""
    from tidegate.engine.execution.runner import ModelRunner
    from tidegate.kernels.weight_matrix import PlainMatrix

    for name in ("linear", "add_linear_"):
        setattr(PlainMatrix, name, watch.timed(getattr(PlainMatrix, name)))
    step = ModelRunner.step

    def marked(runner: ModelRunner, rows: Sequence[Any]) -> Any:
        watch.mark(rows)
        return step(runner, rows)

    setattr(ModelRunner, "step", marked)  # noqa: B010  (a method, to mypy not to be assigned to)


def main() -> int:
    """Be a worker, then write what was noted."""
    watch = Watch()
    watch_kernels(watch)  # before those are imported that ask for compiled functions by name
    from tidegate.engine.worker import main as work

    watch_steps(watch)
    status = work(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(watch.marks))
    return status


if __name__ == "__main__":
    sys.exit(main())
