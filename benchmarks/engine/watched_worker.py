"""Engine worker that records each step's start by four clocks, for :mod:`benchmarks.engine.steps`.

``python -m benchmarks.engine.watched_worker ARGUMENT... FILE`` runs ``tidegate.engine.worker
ARGUMENT...`` and writes a JSON list of :class:`Mark` to FILE, one per step. It times compiled
functions and torch's products, nothing else in a step.
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
"""Number of calls averaged, a millisecond or two."""


class Mark(NamedTuple):
    """The start of a step, in ns; the span between two marks is a step with its messages."""

    at: int
    """Monotonic clock of the machine, which the driver reads too."""
    cpu: int
    """CPU time of the stepping thread."""
    unserved: int
    """Time that the stepping thread was runnable without a core, from schedstat."""
    kernels: int
    """Part of ``cpu`` in compiled functions and torch's products, over the timed steps."""
    is_timed: bool
    """Whether kernels are timed in the step that starts here: every other one, because timing costs
    time."""
    rows: int
    tokens: int


class Watch:
    """Accumulates the CPU time of kernels in the calling thread."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._kernels_ns = 0
        self._is_timed = False
        self._look_ns = _look_ns()
        self._served: int | None = None

    def timed(self, compute: Callable[..., Any], idle_ns: int = 0) -> Callable[..., Any]:
        """Wrap ``compute`` with timing; ``idle_ns`` is the cost of an empty call, which is
        subtracted."""
        less_ns = self._look_ns + idle_ns

        def call(*args: Any) -> Any:
            if not self._is_timed:
                return compute(*args)
            began_ns = time.thread_time_ns()
            result = compute(*args)
            self._kernels_ns += time.thread_time_ns() - began_ns - less_ns
            return result

        return call

    def mark(self, rows: int, tokens: int) -> None:
        """Record the start of a step of this size."""
        if self._served is None:
            self._served = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        unserved = int(os.pread(self._served, 100, 0).split()[1])
        self._is_timed = not self._is_timed
        clocks = time.monotonic_ns(), time.thread_time_ns(), unserved
        self.marks.append(Mark(*clocks, self._kernels_ns, self._is_timed, rows, tokens))


def _look_ns() -> int:
    """Return the cost of one clock read."""
    looks = [time.thread_time_ns() for _ in range(IDLE_CALLS)]
    return (looks[-1] - looks[0]) // IDLE_CALLS


def _idle_ns(arguments: Sequence[Any]) -> int:
    """Return the cost of an empty ctypes call with such arguments, measured with libc's
    ``labs``."""
    idle = ctypes.CFUNCTYPE(compiled.INT, *arguments)(("labs", ctypes.CDLL(None)))
    given = [1.0 if one is compiled.FLOAT else 1 for one in arguments]
    began_ns = time.thread_time_ns()
    for _ in range(IDLE_CALLS):
        idle(*given)
    return (time.thread_time_ns() - began_ns) // IDLE_CALLS


def watch_kernels(watch: Watch) -> None:
    """Time every compiled function that modules fetch from now on."""
    found = compiled.function

    def function(
        functions: ctypes.CDLL,
        name: str,
        arguments: Sequence[Any],
        dtype: torch.dtype | None = None,
    ) -> Callable[..., int]:
        one = found(functions, name, arguments, dtype)
        packs = name.startswith("tg_pack")  # called by another thread, beside the steps
        return one if packs else watch.timed(one, _idle_ns(arguments))

    compiled.function = function


def watch_steps(watch: Watch) -> None:
    """Record every step, and time torch's products."""
    from tidegate.engine.device.runner import DeviceRunner
    from tidegate.engine.execution.runner import DecodeRows, ModelRunner
    from tidegate.kernels.weight_matrix import PlainMatrix

    for name in ("linear", "add_linear_"):
        setattr(PlainMatrix, name, watch.timed(getattr(PlainMatrix, name)))

    def marked(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(runner: object, rows: Sequence[Any]) -> Any:
            decodes = isinstance(rows, DecodeRows)  # whose rows are made when they are read
            tokens = len(rows) if decodes else sum(len(row.token_ids) for row in rows)
            watch.mark(len(rows), tokens)
            return step(runner, rows)

        return call

    for runner, step in ((ModelRunner, ModelRunner.step), (DeviceRunner, DeviceRunner.step)):
        setattr(runner, "step", marked(step))  # noqa: B010  (to mypy a method is no field)


def main() -> int:
    """Run a worker, then write the marks."""
    watch = Watch()
    watch_kernels(watch)  # before the modules that fetch compiled functions are imported
    from tidegate.engine.worker import main as work

    watch_steps(watch)
    *arguments, file = sys.argv[1:]
    status = work(arguments)
    Path(file).write_text(json.dumps(watch.marks))
    return status


if __name__ == "__main__":
    sys.exit(main())
