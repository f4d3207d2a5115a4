"""Parity of an engine on a real GPU with the CPU; skipped without one.

``python -m pytest tests/engine/test_on_a_gpu.py tests/kernels`` on a machine with CUDA and Triton.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import tidegate
from tests.engine.orchestra import named_buffers
from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.device.memory import DeviceMemory
from tidegate.engine.device.runner import DeviceRunner
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.execution.runner import ModelRunner, RowSampling
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import fill_from_directory, load_directory
from tidegate.engine.weights.staging import Staging
from tidegate.errors import WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.messages import (
    InitWeights,
    Message,
    StartWeightUpdate,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
    decode_from_orchestrator,
)
from tidegate.transport.weight_channels import WeightReceiverConfig, sender
from tidegate.transport.weight_channels.cuda_memory import Gpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and Triton"
)

DEVICE = torch.device("cuda:0")
MIB = 2**20


def weights_on_device(path: Path, dtype: torch.dtype = torch.float32) -> DeviceWeights:
    weights = DeviceWeights.on_device(ModelConfig.from_directory(path), dtype, DEVICE)
    fill_from_directory(weights, path)
    return weights


def runner_on_device(path: Path, dtype: torch.dtype = torch.float32) -> DeviceRunner:
    weights = weights_on_device(path, dtype)
    return DeviceRunner(weights.config, weights, num_blocks=512, block_tokens=16)


def runner_on_cpu(path: Path) -> ModelRunner:
    config = ModelConfig.from_directory(path)
    weights = load_directory(path, config, torch.float32, is_packed=False)
    return ModelRunner(config, weights, num_blocks=512, block_tokens=16)


def turns() -> list[DrivenTurn]:
    lengths = (1, 5, 16, 50, 140, 300)
    drawn = [RowSampling(1.0, 0, 1.0, 7, 0), RowSampling(0.8, 20, 0.9, 8, 0)]
    prompts = [[(7 * n + length) % 96 for n in range(length)] for length in lengths]
    return [
        DrivenTurn(prompt, [GREEDY, *drawn][n % 3], ((64,), (3, 5, 1, 7))[n % 2])
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_tokens_and_log_probs_are_those_of_the_cpu(tmp_path: Path, architecture: str) -> None:
    path = make_model_directory(tmp_path, architecture, initializer_range=0.1)
    here, there = turns(), turns()

    drive(runner_on_cpu(path), here, new_tokens=32)
    drive(runner_on_device(path), there, new_tokens=32)

    for one, other in zip(here, there, strict=True):
        assert other.sampled == one.sampled
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_decode_steps_as_cuda_graphs_sample_what_eager_steps_do(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3", initializer_range=0.1)
    weights = weights_on_device(path)
    for other in (weights, weights_on_device(path)):  # captured again for other addresses
        here, there = turns(), turns()
        for has_graphs, driven in ((False, here), (True, there)):
            runner = DeviceRunner(
                weights.config, weights, num_blocks=512, block_tokens=16, has_graphs=has_graphs
            )
            drive(runner, turns(), new_tokens=8)
            runner.swap(other)
            drive(runner, driven, new_tokens=32)
        for one, two in zip(here, there, strict=True):
            assert two.sampled == one.sampled
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_bfloat16_log_probs_stay_near_those_of_float32(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3", initializer_range=0.05)
    exact, rounded = turns(), turns()

    drive(runner_on_cpu(path), exact, new_tokens=1)
    drive(runner_on_device(path, torch.bfloat16), rounded, new_tokens=1)

    greedy = [n for n, turn in enumerate(exact) if turn.sampling is GREEDY]
    for n in greedy:
        assert rounded[n].logprobs == pytest.approx(exact[n].logprobs, abs=0.1)


def test_weights_are_staged_beside_steps_and_served_after_the_swap(tmp_path: Path) -> None:
    paths = [make_model_directory(tmp_path / str(n), "qwen3", seed=n) for n in range(2)]
    runner, expected, driven = runner_on_device(paths[0]), turns(), turns()
    drive(runner_on_device(paths[1]), expected, new_tokens=8)
    staging, channel = Staging(lambda: weights_on_device(paths[0])), sender("shm")
    try:
        staging.init(channel.init())
        staging.start(StartWeightUpdate(version=1))
        for update in channel.write(1, named_buffers(paths[1])):
            staging.update(update)
        answers: list[Message] = []
        while not answers:
            drive(runner, turns(), new_tokens=2)  # decoding continues meanwhile
            answers = staging.take_replies()
        assert [type(one) for one in answers] == [WeightsStaged]
        runner.swap(staging.swap(1, runner.weights))
    finally:
        staging.close()
        channel.close()

    drive(runner, driven, new_tokens=8)

    assert [turn.sampled for turn in driven] == [turn.sampled for turn in expected]
    assert [turn.logprobs for turn in driven] == [turn.logprobs for turn in expected]


def test_memory_that_sleeps_is_given_back_to_the_device(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "llama", intermediate_size=50_000)
    runner, memory = runner_on_device(path), DeviceMemory(DEVICE)
    expected, driven = turns(), turns()
    drive(runner, expected, new_tokens=4)
    weights = memory.regions_of(runner.weights.tensors())
    cache = memory.regions_of(runner.cache_tensors())
    taken = sum(region.nbytes for region in [*weights, *cache])
    held = memory.offload(weights, lambda: None)
    before = torch.cuda.mem_get_info(DEVICE)[0]

    memory.release([*weights, *cache])
    returned = torch.cuda.mem_get_info(DEVICE)[0] - before
    held.restore(lambda: None)
    memory.reallocate(cache, lambda: None)

    assert taken > 64 * MIB
    assert returned > taken // 2  # torch returns whole segments, and some hold other things too
    drive(runner, driven, new_tokens=4)
    assert [turn.logprobs for turn in driven] == [turn.logprobs for turn in expected]


TRAINER = """
import sys
import msgspec, torch
from pathlib import Path
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.transport.messages import encode
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcSender
from tidegate.transport.weight_channels.cuda_memory import NamedTensor, find_gpu

state = {name: tensor.to("cuda:0") for name, tensor in read_tensors(Path(sys.argv[1]))}
torch.cuda.synchronize()
own = torch.cuda.memory_allocated()
channel = CudaIpcSender(find_gpu("cuda:0"))
print(encode(channel.init()).hex(), flush=True)
for version in (1, 2, 3):
    updates = channel.write(version, [NamedTensor(*named) for named in state.items()])
    for tensor in state.values():
        tensor.zero_()  # what was written doesn't follow
    for tensor, (_, again) in zip(state.values(), read_tensors(Path(sys.argv[1]))):
        tensor.copy_(again)
    print(" ".join(encode(update).hex() for update in updates), flush=True)
    sys.stdin.readline()
held = torch.cuda.memory_allocated() - own
channel.close()
print(held, torch.cuda.memory_allocated() - own, flush=True)
"""
"""Publishes a model directory three times, each time on request."""


def test_weights_by_cuda_ipc_are_staged_out_of_another_processs_memory_and_freed(
    tmp_path: Path,
) -> None:
    paths = [make_model_directory(tmp_path / str(n), "qwen3", seed=n) for n in range(2)]
    runner, expected, driven = runner_on_device(paths[0]), turns(), turns()
    drive(runner_on_device(paths[1]), expected, new_tokens=8)
    set_bytes = sum(tensor.data.nbytes for tensor in named_buffers(paths[1]))
    staging = Staging(lambda: weights_on_device(paths[0]), WeightReceiverConfig(gpu=Gpu(DEVICE)))
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(paths[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        init = decode_from_orchestrator(bytes.fromhex(trainer.stdout.readline()))
        assert isinstance(init, InitWeights)
        staging.init(init)
        for version in (1, 2, 3):
            staging.start(StartWeightUpdate(version=version))
            for frame in trainer.stdout.readline().split():
                update = decode_from_orchestrator(bytes.fromhex(frame))
                assert isinstance(update, UpdateWeights)
                if version == 2:  # CUDA rejects an unknown handle, and continues
                    assert update.ipc_handle is not None
                    handle = update.ipc_handle.handle[:2] + bytes(64)
                    memory = msgspec.structs.replace(update.ipc_handle, handle=handle)
                    update = msgspec.structs.replace(update, ipc_handle=memory)
                staging.update(update)
            answers: list[Message] = []
            while not answers:
                drive(runner, turns(), new_tokens=2)  # decoding continues meanwhile
                answers = staging.take_replies()
            assert [type(one) for one in answers] == [
                WeightsFailed if version == 2 else WeightsStaged
            ]
            if version != 2:
                runner.swap(staging.swap(version, runner.weights))
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        held, left = map(int, trainer.stdout.readline().split())
    finally:
        trainer.kill()
        trainer.wait(60)
        staging.close()
    assert set_bytes <= held < 2 * set_bytes
    assert left == 0
    drive(runner, driven, new_tokens=8)
    assert [turn.sampled for turn in driven] == [turn.sampled for turn in expected]
    assert [turn.logprobs for turn in driven] == [turn.logprobs for turn in expected]


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=8)
    episode.append([13, 14])
    return float((await episode.generate(max_tokens=4)).token_ids[0] % 2)


async def test_a_run_by_cuda_ipc_serves_what_its_trainer_publishes_whole_and_in_parts(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", "qwen3")
    state = {name: tensor.to(DEVICE) for name, tensor in read_tensors(model)}
    noise = torch.Generator(DEVICE).manual_seed(0)
    part = dict(list(state.items())[3:6])
    async with tidegate.serve(
        model=model,
        engines=2,
        device=str(DEVICE),
        weight_channel="cuda_ipc",
        weight_checksums=True,
        group_size=2,
        groups_per_batch=2,
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for _ in rollouts.batches(range(12), episode=two_turns):
            for tensor in state.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=noise, device=DEVICE)
            await rollouts.publish(state)
            for tensor in part.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=noise, device=DEVICE)
            await rollouts.publish(part, partial=True)
            with pytest.raises(WeightsRefused, match="is on cpu"):
                await rollouts.publish({name: tensor.cpu() for name, tensor in state.items()})
    report = audit_run(tmp_path / "run", tolerance=1e-3)
    assert report.agrees, report.lines()
    assert report.versions > 1
