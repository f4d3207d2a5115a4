"""CUDA graphs of decode steps, with a stand-in for CUDA's capture on a CPU.

A graph replays the launches of one step for all others of its shape. The stand-in runs the launches
again, and checks that they are the same: kernels, grids, numbers, sizes, and addresses of whatever
existed before the step. A CPU's memory shows nothing of streams: those only a GPU can show.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.device.graphs import ROWS, DecodeGraphs
from tidegate.engine.device.memory import DeviceMemory
from tidegate.engine.device.plan import HostPlanner
from tidegate.engine.device.runner import DeviceRunner
from tidegate.engine.device.weights import DeviceWeights, PinnedTransfer
from tidegate.engine.execution.runner import Row, RowSampling
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import fill_from_directory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TRITON_INTERPRET" not in os.environ, reason="its device is the CPU, in the interpreter"
    ),
]

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 40}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations and kernels, with the addresses of tensors that they did not make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[Any, ...]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.add(str(func), args, kwargs)
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor) and not self._is_given(each, args):
                self._made.add(each.untyped_storage().data_ptr())
        return result

    def add(self, name: str, *given: Any) -> None:
        self.entries.append((name, *map(self._described, tree_flatten(given)[0])))

    def _described(self, given: Any) -> object:
        if not isinstance(given, torch.Tensor) or given.dim() == 0:  # a number, made on the host
            return repr(given)
        is_made = given.untyped_storage().data_ptr() in self._made
        where = "made" if is_made else given.data_ptr()
        return given.dtype, tuple(given.shape), given.stride(), where

    def _is_given(self, tensor: torch.Tensor, args: Any) -> bool:
        """Whether a tensor is a view of an operation's input."""
        storages = {
            each.untyped_storage().data_ptr()
            for each in tree_flatten(args)[0]
            if isinstance(each, torch.Tensor)
        }
        return tensor.untyped_storage().data_ptr() in storages


class RepeatedLaunches:
    """Stands for CUDA's capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures = self.replays = 0
        self._recorder: Recorder | None = None
        run = InterpretedFunction.run

        def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            if self._recorder is not None:
                self._recorder.add(kernel.__name__, grid, args, named)
            with _disable_current_modes():
                run(kernel, *args, grid=grid, warmup=warmup, **named)

        monkeypatch.setattr(InterpretedFunction, "run", recorded)

    def __call__(
        self, launch: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        self.captures += 1
        output, captured = self._record(launch)
        output.fill_(torch.nan)  # a capture launches nothing

        def replay() -> None:
            self.replays += 1
            again, record = self._record(launch)
            assert record == captured
            output.copy_(again)

        return output, replay

    def _record(self, launch: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
        with Recorder() as self._recorder:
            output = launch()
        entries, self._recorder = self._recorder.entries, None
        return output, entries


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> RepeatedLaunches:
    return RepeatedLaunches(monkeypatch)


def weights_of(path: Path) -> DeviceWeights:
    weights = DeviceWeights.on_device(ModelConfig.from_directory(path), torch.float32, CPU)
    fill_from_directory(weights, path)
    return weights


def make_runner(path: Path, capture: Any = None) -> DeviceRunner:
    weights = weights_of(path)
    return DeviceRunner(weights.config, weights, num_blocks=96, block_tokens=4, capture=capture)


def turns(count: int) -> list[DrivenTurn]:
    drawn = RowSampling(0.9, 12, 0.9, 7, 0)
    return [
        DrivenTurn([(3 * n + k) % 40 for k in range(3 + 5 * n)], (GREEDY, drawn)[n % 2], (64,))
        for n in range(count)
    ]


def test_steps_of_a_shape_are_one_graph_and_sample_what_eager_steps_do(
    tmp_path: Path, capture: RepeatedLaunches
) -> None:
    path = make_model_directory(tmp_path, "gemma2", sliding_window=5, **SMALL)
    graphed, eager = make_runner(path, capture), make_runner(path)
    for count in (3, 1, 4):
        here, there = turns(count), turns(count)
        drive(eager, here, new_tokens=3)
        drive(graphed, there, new_tokens=3)
        for one, other in zip(here, there, strict=True):
            assert other.sampled == one.sampled
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)

    # Three and four rows are padded to four; the first step of a shape is eager.
    assert (capture.captures, capture.replays) == (2, 1 + 1 + 2)


def test_swapped_weights_and_memory_that_moved_have_graphs_of_their_own(
    tmp_path: Path, capture: RepeatedLaunches
) -> None:
    paths = [
        make_model_directory(tmp_path / str(n), "qwen3", seed=n, num_hidden_layers=1, **SMALL)
        for n in range(2)
    ]
    runner, expected, driven = make_runner(paths[0], capture), turns(2), turns(2)
    drive(runner, turns(2), new_tokens=3)
    first, second = runner.weights, weights_of(paths[1])
    runner.swap(second)
    drive(runner, driven, new_tokens=3)
    drive(make_runner(paths[1]), expected, new_tokens=3)
    assert [turn.sampled for turn in driven] == [turn.sampled for turn in expected]
    assert capture.captures == 2

    runner.swap(first)
    drive(runner, turns(2), new_tokens=3)
    assert capture.captures == 2

    memory, taken = DeviceMemory(CPU), []
    regions = memory.regions_of(first.tensors())
    held = memory.offload(regions, lambda: None)
    memory.release(regions)
    taken = [torch.empty(region.nbytes, dtype=torch.uint8) for region in regions]
    held.restore(lambda: None)
    drive(runner, turns(2), new_tokens=3)
    assert capture.captures == 3
    assert taken


def test_a_graph_that_cannot_be_captured_leaves_steps_eager(tmp_path: Path) -> None:
    def refuse(launch: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    path = make_model_directory(tmp_path, "qwen3", num_hidden_layers=1, **SMALL)
    driven, expected = turns(3), turns(3)
    drive(make_runner(path, refuse), driven, new_tokens=3)
    drive(make_runner(path), expected, new_tokens=3)

    assert [turn.sampled for turn in driven] == [turn.sampled for turn in expected]


@pytest.mark.parametrize(
    ("sizes", "is_sampled"),
    [([(9, 1), (0, 2)], True), ([(9, 1)], False), ([(1, 1)] * (ROWS[-1] + 1), True)],
)
def test_prefills_unsampled_rows_and_very_large_steps_have_no_graph(
    sizes: list[tuple[int, int]], is_sampled: bool
) -> None:
    rows = [
        Row(np.zeros(count, np.int32), start, [0, 1, 2], GREEDY if is_sampled else None)
        for start, count in sizes
    ]

    def never(*given: object) -> Any:
        raise AssertionError("launched")

    graphs = DecodeGraphs(never, never, CPU, [])
    assert graphs.forward(None, HostPlanner(4).plan(rows)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 33), (64,)])
def test_tensors_larger_than_the_pinned_buffers_arrive_whole(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(dtype)
    transfer = PinnedTransfer(CPU, buffer_bytes=64)

    for sent in (tensor, tensor.mT if len(shape) == 2 else tensor):
        copied = transfer.send(sent)
        assert torch.equal(copied, sent)
        assert copied.data_ptr() != sent.data_ptr() or not sent.numel()
