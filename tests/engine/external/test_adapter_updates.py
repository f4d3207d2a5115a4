"""Updates of LoRA adapters without the model's own weights, and their effect on turns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.external.fake_engine import FakeEngine
from tests.engine.weights.test_partial_updates import Rig
from tests.engine.weights.test_staging import answers, assert_same
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.weights.staging import Live
from tidegate.errors import TurnRefused
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport import messages
from tidegate.transport.messages import (
    Adapter,
    BaseVersions,
    FinishWeightUpdate,
    Message,
    SamplingParams,
    StartWeightUpdate,
    SubmitTurn,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, "qwen2")
    yield rig
    rig.close()


def pair(value: float) -> dict[str, torch.Tensor]:
    return {
        f"{DOWN}.lora_A.weight": torch.full((2, 96), value),
        f"{DOWN}.lora_B.weight": torch.full((64, 2), value),
    }


def stage(
    rig: Rig,
    version: int,
    adapters: dict[Adapter, dict[str, torch.Tensor]],
    bases: BaseVersions | None,
) -> list[Message]:
    """Publish adapters only."""
    rig.staging.start(StartWeightUpdate(version=version), rig.live)
    for number, (adapter, tensors) in enumerate(adapters.items(), 1):
        [update] = rig.channel.write(
            100 * version + number, named_buffers(tensors), keep=range(999)
        )
        rig.staging.update(
            UpdateWeights(
                version=version,
                location=update.location,
                tensors=update.tensors,
                is_last=number == len(adapters),
                base_versions=bases,
                adapter=adapter,
            )
        )
    return answers(rig.staging)


def test_adapters_come_without_a_copy_of_the_models_weights_and_take_the_place_of_all_before(
    rig: Rig,
) -> None:
    live = rig.live.weights
    assert isinstance(live, Weights)
    two = {Adapter("a", 3.0): pair(0.5), Adapter("b", 1.0): pair(2.0)}
    assert isinstance(stage(rig, 4, two, BaseVersions(3, 3))[0], WeightsStaged)
    assert live.adapters == {}
    assert rig.staging.swap(4, live) is live
    assert live.adapters.keys() == {"a", "b"}
    added = live.adapters["a"][1]["down"]
    assert torch.equal(added.lora_b.unpacked(), torch.full((64, 2), 1.5))
    assert live.adapters["a"][0] == {}
    rig.live = Live(4, live)
    assert isinstance(
        stage(rig, 5, {Adapter("b", 1.0): pair(1.0)}, BaseVersions(3, 4))[0], WeightsStaged
    )
    assert rig.staging.swap(5, live).adapters.keys() == {"b"}
    assert_same(live, rig.expected(set()))


def test_adapters_alone_are_no_whole_set(rig: Rig) -> None:
    [failed] = stage(rig, 4, {Adapter("a", 1.0): pair(1.0)}, None)
    assert isinstance(failed, WeightsFailed)
    assert "tensors are missing" in failed.message
    assert rig.live.weights.adapters == {}


def test_an_adapter_that_does_not_fit_leaves_those_that_serve(rig: Rig) -> None:
    good, odd = Adapter("a", 1.0), Adapter("odd", 1.0)
    half = {f"{DOWN}.lora_A.weight": torch.ones(2, 96)}
    [failed] = stage(rig, 4, {good: pair(1.0), odd: half}, BaseVersions(3, 3))
    assert isinstance(failed, WeightsFailed)
    assert f"one of {DOWN!r}'s lora_A.weight and lora_B.weight without" in failed.message
    assert rig.live.weights.adapters == {}


def test_turns_end_with_their_adapter_and_contexts_are_found_under_their_own_only() -> None:
    engine = FakeEngine(block_tokens=2, max_step_tokens=64, num_blocks=64)
    scheduler = engine.scheduler
    swap = FinishWeightUpdate(version=1, pause_mode="keep", kv_policy="keep")
    scheduler.weights_swapped(swap, adapters={"a", "b"})
    for handle, adapter in enumerate(["a", "", "b", "a"]):
        sampling = SamplingParams(max_tokens=9, adapter=adapter)
        prompt = torch.arange(7, dtype=torch.int32).numpy().tobytes()
        scheduler.submit(SubmitTurn(turn=handle, token_ids=prompt, sampling=sampling))
    rows = scheduler.plan()
    # The last finds what the first computes; no other turn shares it.
    assert [(row.adapter, row.start) for row in rows] == [("a", 0), ("", 0), ("b", 0), ("a", 6)]
    scheduler.complete(engine.runner.step(rows))
    swap = FinishWeightUpdate(version=2, pause_mode="keep", kv_policy="keep")
    scheduler.weights_swapped(swap, adapters={"b"})
    assert scheduler.handles == [1, 2]
    why = "weights v2 have no adapter 'a'"
    assert scheduler.take_replies() == [
        messages.TurnFailed(turn=0, message=why),
        messages.TurnFailed(turn=3, message=why),
    ]
    scheduler.check()
    sampling = SamplingParams(max_tokens=9, adapter="a")
    with pytest.raises(TurnRefused, match=r"v2 has no adapter 'a', it has \['b'\]"):
        scheduler.submit(SubmitTurn(turn=9, token_ids=bytes(4), sampling=sampling))
