"""CUDA graphs of decode steps: one launch per step in place of one per kernel.

A step in which every row decodes one token is launched as a graph. A graph replays the same kernels
at the same addresses. So a step is padded to a graph's number of rows, and its arrays are uploaded
to the graph's own buffers. The first step of a shape runs eagerly, which compiles its kernels; the
second is captured.

A graph is replayed only while weights, KV cache and buffers are at the captured addresses. Swapped
weights have graphs of their own, and memory that moved during sleep gets new graphs. Padding rows
write nothing, and attend to one cached position, which keeps their numbers finite.
"""

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidegate.engine.device.plan import DevicePlan, HostPlan, Upload
from tidegate.engine.device.weights import DeviceWeights

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
"""Numbers of rows that steps are padded to. Larger steps run eagerly: there the kernels take longer
than their launches."""

GRAPHS_MAX = 96
"""Graphs in memory; the least recently used leaves first. Two sets of weights, each with some
numbers of rows and two or three context lengths."""

Replay = Callable[[], None]

Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Captures the launches of a function; returns the function's result and what computes it again,
in the same memory."""

Forward = Callable[[DeviceWeights, DevicePlan], torch.Tensor]


class Shape(NamedTuple):
    """What a graph depends on, besides its addresses."""

    rows: int
    table_blocks: int


@dataclass(slots=True)
class _Step:
    """Buffers of one shape, and its graph once it is captured."""

    upload: Upload
    output: torch.Tensor | None = None
    replay: Replay | None = None


class CudaCapture:
    """Captures with ``torch.cuda.graph``; all graphs share one memory pool.

    One graph's replay may overwrite another's output, which a step has already read. Other threads
    continue to allocate and copy meanwhile, so only this thread's calls are restricted.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Capture ``launch``, which is not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = launch()
        return output, graph.replay


class DecodeGraphs:
    """Runs the forward passes of decode steps as graphs."""

    def __init__(
        self,
        capture: Capture,
        forward: Forward,
        device: torch.device,
        constants: Sequence[torch.Tensor],
    ) -> None:
        """``constants`` are tensors besides the weights that ``forward`` reads and writes."""
        self._capture: Capture | None = capture
        self._forward = forward
        self._device = device
        self._constants = constants
        self._steps: OrderedDict[tuple[Shape, tuple[int, ...]], _Step] = OrderedDict()
        self._weights: DeviceWeights | None = None
        self._tensors: list[torch.Tensor] = []

    def forward(self, weights: DeviceWeights, host: HostPlan) -> torch.Tensor | None:
        """Launch a step's forward pass; return the hidden states of its rows.

        Returns None for steps that no graph computes: they have a row of several tokens, a row
        that is scored or not sampled, or too many rows.
        """
        rows = host.decode_rows
        if self._capture is None or not 0 < rows <= ROWS[-1]:
            return None
        padded = host.padded(ROWS[bisect_left(ROWS, rows)])
        shape = Shape(padded.decode_rows, padded.table_blocks)
        step = self._step(shape, weights)
        is_new = step.upload.is_unused
        plan = padded.on_device(step.upload.send(padded.arrays))
        if is_new:
            return self._forward(weights, plan)[:rows]
        if step.replay is None:
            try:
                step.output, step.replay = self._capture(lambda: self._forward(weights, plan))
            except RuntimeError as error:
                log.warning("steps run without CUDA graphs: %s", error)
                self._capture = None
                self._steps.clear()
                return None
        assert step.output is not None
        step.replay()
        return step.output[:rows]

    def _step(self, shape: Shape, weights: DeviceWeights) -> _Step:
        """Return the buffers and the graph of a shape, for the addresses that are in use now."""
        if weights is not self._weights:
            self._weights, self._tensors = weights, [*weights.tensors(), *self._constants]
        key = shape, tuple(tensor.data_ptr() for tensor in self._tensors)
        if (step := self._steps.get(key)) is None:
            step = self._steps[key] = _Step(Upload(self._device))
            if len(self._steps) > GRAPHS_MAX:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step
