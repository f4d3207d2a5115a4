"""A trainer publishes only what changed, to real engine processes, and every token is audited."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tidegate.errors import ConfigError, WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.weight_channels import WeightChannelName
from tidegate.transport.weight_channels.zmq import ZmqSender

pytestmark = pytest.mark.wire


async def episode(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=8)
    return float(turn.token_ids[0] % 2)


async def test_of_whole_sets_only_what_changed_travels_and_tokens_are_audited(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", tied=False)
    state = load_file(model / "model.safetensors")
    trained = {name: tensor for name, tensor in state.items() if ".layers.1." in name}
    trained_bytes, all_bytes = (sum(t.nbytes for t in s.values()) for s in (trained, state))
    noise = torch.Generator().manual_seed(0)
    sent = []
    async with tidegate.serve(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        weight_channel="zmq",
        weight_deltas=True,
        run_directory=tmp_path / "run",
    ) as rollouts:
        channel = rollouts._running.channel
        assert isinstance(channel, ZmqSender)
        async for _ in rollouts.batches(range(10), episode=episode):
            before = channel.sent_bytes
            for tensor in trained.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=noise)
            await rollouts.publish(state)
            sent.append(channel.sent_bytes - before)
            with pytest.raises(WeightsRefused, match="contains NaN or infinity"):
                await rollouts.publish({**state, "lm_head.weight": state["lm_head.weight"] / 0.0})
    # A first one whole; then those of one layer, with up to 64 bytes between two.
    assert sent[0] >= all_bytes > 2 * trained_bytes
    for others in sent[1:]:
        assert trained_bytes <= others <= trained_bytes + 64 * len(trained)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.versions > 1


async def test_tokens_of_versions_published_in_parts_are_audited(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    state = load_file(model / "model.safetensors")
    names = list(state)
    noise = torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        weight_channel="zmq",
        max_staleness=1,
        weight_checksums=True,
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for batch in rollouts.batches(range(12), episode=episode):
            step = rollouts.version
            part = {name: state[name] for name in names[step * 4 : step * 4 + 5]}
            for tensor in part.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=noise)
            if step == 3:
                await rollouts.publish(state)
            else:
                await rollouts.publish(part, batches=[batch], partial=True)
            with pytest.raises(WeightsRefused, match="has no tensor 'head'"):
                await rollouts.publish({"head": torch.zeros(3)}, partial=True)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.versions >= 3  # none sampled for more than two batches


def train(state: dict[str, torch.Tensor], noise: torch.Generator, share: float = 0.02) -> None:
    """Change some elements of every tensor by a few units in the last place."""
    for tensor in state.values():
        chosen = torch.rand(tensor.shape, generator=noise) < share
        tensor.view(torch.int16)[chosen] += 20


@pytest.mark.parametrize("weight_channel", ["shm", "zmq", "relay", "collective", "disk"])
async def test_patches_of_elements_reach_engines_that_stay_and_one_that_comes_late(
    tmp_path: Path, weight_channel: WeightChannelName
) -> None:
    model = make_model_directory(tmp_path / "model", tied=False, dtype="bfloat16")
    state = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    async with tidegate.serve(
        model=model,
        engines=2,
        group_size=2,
        groups_per_batch=2,
        weight_channel=weight_channel,
        weight_deltas="elements",
        weight_checksums=True,
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for _ in rollouts.batches(range(12), episode=episode):
            train(state, noise)
            await rollouts.publish(state)
            if rollouts.version == 3:  # its successor gets the whole set and all patches since
                children(recursive=True)[0].kill()
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.versions > 3


async def test_patches_travel_in_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model", tied=False, dtype="bfloat16")
    state = load_file(model / "model.safetensors")
    whole_bytes = sum(tensor.nbytes for tensor in state.values())
    noise = torch.Generator().manual_seed(0)
    sent = []
    async with tidegate.serve(
        model=model, engines=1, weight_channel="zmq", weight_deltas="elements"
    ) as rollouts:
        channel = rollouts._running.channel
        assert isinstance(channel, ZmqSender)
        for _ in range(3):
            before = channel.sent_bytes
            await rollouts.publish(state)
            sent.append(channel.sent_bytes - before)
            train(state, noise, share=0.01)
        with pytest.raises(WeightsRefused, match="contains NaN or infinity"):
            await rollouts.publish({**state, "lm_head.weight": state["lm_head.weight"] / 0.0})
        before = channel.sent_bytes
        await rollouts.publish(state)  # whole again, because of the failure before
        assert channel.sent_bytes - before >= whole_bytes
    assert sent[0] >= whole_bytes
    assert max(sent[1:]) < 0.04 * whole_bytes  # small tensors have the frame's overhead


def test_patches_and_rounded_weights_are_refused_together(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    with pytest.raises(ConfigError, match="quantization='int8' and weight_deltas='elements'"):
        tidegate.serve(model=model, quantization="int8", weight_deltas="elements")
