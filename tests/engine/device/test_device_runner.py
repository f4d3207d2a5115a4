"""Parity of the device runner with transformers and with the CPU runner.

The device is the CPU, with the real kernels in Triton's interpreter.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.models.test_model_parity import TOLERANCE_NATS, assert_sampled_by, load_peer
from tests.engine.orchestra import named_buffers
from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.device.memory import (
    SLEEP_DEEPER,
    DeviceMemory,
    DeviceRegion,
    OffloadedStorages,
)
from tidegate.engine.device.runner import DeviceRunner
from tidegate.engine.device.sampling import HostDraw
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.execution.runner import DecodeRows, ModelRunner, Row, RowSampling, Runner
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import fill_from_directory, load_directory
from tidegate.engine.sampling.options import RowOptions
from tidegate.engine.sampling.scoring import Reads, RowScoring
from tidegate.engine.sampling.seen_tokens import SeenCounts
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import OutOfMemory, WeightsRefused
from tidegate.transport.attachments import AttachmentName
from tidegate.transport.messages import StartWeightUpdate, WeightsStaged
from tidegate.transport.sampling import SamplingParams, TokenBias
from tidegate.transport.sleep_messages import Asleep, Awake, Sleep, SleepRequestFailed, Wake
from tidegate.transport.weight_channels import sender

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TRITON_INTERPRET" not in os.environ, reason="its device is the CPU, in the interpreter"
    ),
]

CPU = torch.device("cpu")
VOCAB = 40
LIMITS = EngineLimits(
    max_running_turns=8,
    max_step_tokens=64,
    num_blocks=48,
    block_tokens=4,
    context_tokens_max=64,
    vocab_size=VOCAB,
)
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCAB}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"sliding_window": 5}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}),
}


def device_weights(path: Path) -> DeviceWeights:
    return DeviceWeights.on_device(ModelConfig.from_directory(path), torch.float32, CPU)


def device_runner(path: Path) -> DeviceRunner:
    weights = device_weights(path)
    fill_from_directory(weights, path)
    return DeviceRunner(weights.config, weights, num_blocks=48, block_tokens=4)


def cpu_runner(path: Path) -> ModelRunner:
    config = ModelConfig.from_directory(path)
    weights = load_directory(path, config, torch.float32, is_packed=False)
    return ModelRunner(config, weights, num_blocks=48, block_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for tests that do not depend on the number of layers."""
    return make_model_directory(
        tmp_path_factory.mktemp("model"), "gemma2", num_hidden_layers=1, **SMALL
    )


def row(tokens: list[int], block: int, sampling: RowSampling | None = GREEDY) -> Row:
    blocks = -(-len(tokens) // 4)
    return Row(np.array(tokens, np.int32), 0, list(range(block, block + blocks)), sampling)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_log_probs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, fields = MODELS[name]
    path = make_model_directory(tmp_path, architecture, num_hidden_layers=2, **SMALL | fields)
    turns = [  # whose chunks and decodes share steps
        DrivenTurn([5, 30, 17], GREEDY, (8,)),
        DrivenTurn([9, 2, 2, 31, 8, 7, 1, 12, 3, 3, 20], GREEDY, (4, 7)),
    ]

    drive(device_runner(path), turns, new_tokens=3)

    assert_sampled_by(load_peer(path), turns)


def options(prompt: list[int], **requested: Any) -> RowOptions:
    params = SamplingParams(max_tokens=8, **requested)
    tokens = np.array(prompt, np.int32)
    made = RowOptions(params, tokens, len(prompt))
    if params.repetition_penalty != 1:
        made.seen = SeenCounts(params, tokens, len(prompt), len(prompt), VOCAB)
    return made


def test_every_sampling_option_draws_and_reports_what_an_engine_on_a_cpu_does(model: Path) -> None:
    prompt = [3, 14, 15, 9]
    bias = [TokenBias(7, 3.0)]
    requested = [
        RowSampling(0.0, 0, 1.0, 1, 0),
        RowSampling(1.3, 0, 1.0, 2, 0),
        RowSampling(0.7, 5, 1.0, 3, 1),
        RowSampling(1.0, 0, 0.6, 4, 2),
        RowSampling(1.0, 0, 1.0, 5, 0, options(prompt, min_p=0.2)),
        RowSampling(1.0, 9, 0.9, 6, 0, options(prompt, repetition_penalty=1.7)),
        RowSampling(0.9, 0, 1.0, 7, 0, options(prompt, logit_bias=bias, top_logprobs=3)),
        RowSampling(0.9, 4, 1.0, 8, 0, options(prompt, raw_logprobs=True, hidden_states=True)),
    ]
    rows = [row(prompt, n, one) for n, one in enumerate(requested)]

    expected = cpu_runner(model).step(rows)
    output = device_runner(model).step(rows)

    assert output.token_ids.tolist() == expected.token_ids.tolist()
    assert output.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=TOLERANCE_NATS)
    assert output.token_ids.dtype == np.int32
    assert output.attachments.keys() == expected.attachments.keys() == {6, 7}
    assert output.attachments[6]["top_ids"] == expected.attachments[6]["top_ids"]
    names: dict[AttachmentName, int] = {"raw_logprobs": 1, "hidden_states": SMALL["hidden_size"]}
    for name, length in names.items():
        reported, target = (
            np.frombuffer(each.attachments[7][name], np.float32) for each in (output, expected)
        )
        assert len(reported) == length
        np.testing.assert_allclose(reported, target, atol=TOLERANCE_NATS, rtol=TOLERANCE_NATS)


def test_scores_beside_a_decoding_turn_are_those_of_an_engine_on_a_cpu(model: Path) -> None:
    tokens = [8, 1, 30, 22, 5, 6]
    after = np.array(tokens[1:], np.int32)
    nothing = np.empty(0, np.int32)
    requested: list[tuple[Reads, Any, int]] = [
        ("logprobs", after, 0),
        ("logprobs", after, 2),
        ("hidden_states", nothing, 0),
        ("sum", nothing, 0),
    ]
    rows = [row([4, 4, 2], 40)]
    for n, (reads, ids, top) in enumerate(requested):
        scored = row(tokens, 4 * n, None)
        scored.scoring = RowScoring(len(tokens) - (reads == "logprobs"), reads, ids, top, 1.5)
        scored.token_ids = scored.token_ids[: scored.scoring.positions]
        rows.append(scored)

    expected = cpu_runner(model).step(rows)
    output = device_runner(model).step(rows)

    assert output.token_ids.tolist() == expected.token_ids.tolist()
    for score, other in zip(output.scores, expected.scores, strict=True):
        for name in ("logprobs", "top_ids", "top_logprobs", "ranks", "values"):
            reported, target = getattr(score, name), getattr(other, name)
            assert (reported is None) == (target is None)
            if reported is not None:
                np.testing.assert_allclose(reported, target, atol=TOLERANCE_NATS, rtol=1e-4)


def test_a_row_attends_to_blocks_that_rows_before_it_fill_in_the_same_step(model: Path) -> None:
    prompt = [n % VOCAB for n in range(3, 13)]
    whole, other = row(prompt, 0), row(prompt, 0)
    other.token_ids, other.start, other.block_table = other.token_ids[8:], 8, [0, 1, 9]

    output = device_runner(model).step([whole, other])

    assert output.token_ids[0] == output.token_ids[1]
    assert output.logprobs[0] == pytest.approx(output.logprobs[1], abs=TOLERANCE_NATS)


def sampled(runner: Runner) -> tuple[list[int], list[float]]:
    turn = DrivenTurn([6, 29, 3], GREEDY, (8,))
    drive(runner, [turn], new_tokens=1)
    return turn.sampled, turn.logprobs


def test_weights_staged_beside_the_live_ones_serve_after_a_swap_also_out_of_their_sleep(
    model: Path, tmp_path: Path
) -> None:
    other = make_model_directory(tmp_path, "gemma2", num_hidden_layers=1, seed=1, **SMALL)
    runner, memory = device_runner(model), DeviceMemory(CPU)
    expected = sampled(device_runner(other))
    staging, channel = Staging(lambda: device_weights(model)), sender("shm")
    staging.init(channel.init())
    was_asleep = []
    try:
        for version in (1, 2):
            staging.start(StartWeightUpdate(version=version))
            for update in channel.write(version, named_buffers(other)):
                staging.update(update)
            while staging.is_busy and not staging.is_staged(version):
                staged = staging.take_replies()
            assert [type(one) for one in staged] == [WeightsStaged]
            before = sampled(runner)
            runner.swap(staging.swap(version, runner.weights))

            assert sampled(runner) == expected
            assert (before == expected) == (version == 2)
            buffer = memory.regions_of(staging.tensors())
            memory.release(buffer)  # and the next update needs no word to have it again
            was_asleep += [region.storage.nbytes() for region in buffer]
    finally:
        staging.close()
        channel.close()
    assert not any(was_asleep)


def test_device_memory_has_its_contents_again_after_a_sleep(model: Path) -> None:
    runner, memory = device_runner(model), DeviceMemory(CPU)
    expected = sampled(runner)
    weights = memory.regions_of(runner.weights.tensors())
    cache = memory.regions_of(runner.cache_tensors())
    held = memory.offload(weights, lambda: None)

    memory.release([*weights, *cache])
    assert not any(region.storage.nbytes() for region in [*weights, *cache])
    assert memory.regions_of(runner.cache_tensors()) == cache  # with what they take awake
    held.restore(lambda: None)
    memory.reallocate(cache, lambda: None)

    assert all(not tensor.any() for tensor in runner.cache_tensors())
    assert sampled(runner) == expected


class Crowded(DeviceMemory):
    """Device memory of a machine whose host has no room to offload it."""

    def offload(
        self, regions: Sequence[DeviceRegion], beat: Callable[[], None]
    ) -> OffloadedStorages:
        raise OutOfMemory(doing="to keep weights", remedy=SLEEP_DEEPER, why="none left")


def test_weights_that_the_host_has_no_room_for_stay_and_others_sleep_deeper(model: Path) -> None:
    runner = device_runner(model)
    expected, weights = sampled(runner), runner.weights
    scheduler = EngineScheduler(LIMITS)
    staging = Staging(lambda: device_weights(model))

    def reload(store: WeightStore, beat: Callable[[], None]) -> None:
        fill_from_directory(store, model, beat)

    try:
        sleep_controller = SleepController(
            runner, staging, scheduler, reload=reload, memory=Crowded(CPU)
        )
        scheduler.pause("abort")
        sleep_controller.queue_request(Sleep(request_id=1, level=1, tags=["weights"]))
        [failed] = sleep_controller.run_pending()
        assert isinstance(failed, SleepRequestFailed)
        assert "sleep at level 2" in failed.message
        assert (sleep_controller.asleep, sampled(runner)) == ([], expected)
        sleep_controller.queue_request(Sleep(request_id=2, level=2, tags=["weights"]))
        assert isinstance(sleep_controller.run_pending()[0], Asleep)
        assert not weights.final_norm.untyped_storage().nbytes()
        assert isinstance(sleep_controller.wake(Wake(request_id=3, tags=["weights"])), Awake)
    finally:
        staging.close()
    assert sampled(runner) == expected


def test_adapters_are_refused_and_so_are_another_engines_weights(model: Path) -> None:
    runner = device_runner(model)
    with pytest.raises(WeightsRefused, match="no LoRA adapters yet; merge them"):
        runner.weights.make_adapter({}, 1.0)
    with pytest.raises(TypeError, match="DeviceRunner, got Weights"):
        runner.swap(cpu_runner(model).weights)


def test_rows_in_columns_are_drawn_with_their_own_limits() -> None:
    sampling = [RowSampling(0.7, 5, 1.0, 3, 1), RowSampling(1.0, 0, 0.6, 4, 2)]
    rows = [Row(np.array([n], np.int32), 3, [n], each) for n, each in enumerate(sampling)]

    arrays = zip(
        HostDraw.of_decodes(DecodeRows(rows)).arrays, HostDraw(sampling).arrays, strict=True
    )
    assert all(np.array_equal(of_columns, of_rows) for of_columns, of_rows in arrays)
