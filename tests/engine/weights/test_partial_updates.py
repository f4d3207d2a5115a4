"""Partial weight sets change the tensors that they contain, and nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.engine.orchestra import named_buffers
from tests.engine.weights.test_staging import answers, assert_same
from tests.models import make_model_directory
from tidegate.engine.execution.served_model import ServedModel, open_model
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_weights import Quantization, fill_from_directory
from tidegate.engine.weights.staging import Live, Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.orchestrator.weight_sync.state_dict import named_buffers as buffers_of
from tidegate.transport.messages import (
    BaseVersions,
    Message,
    StartWeightUpdate,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import WeightSender, sender
from tidegate.transport.weight_channels.checksums import checksums, with_checksums

MODEL_TYPES = ["qwen2", "qwen3_moe", "gpt2"]  # the last is computed by transformers


class Rig:
    """A model that serves version 3, and a channel for new weights."""

    def __init__(self, root: Path, model_type: str) -> None:
        self.paths = [
            make_model_directory(root / str(seed), model_type, seed=seed) for seed in range(2)
        ]
        self.model: ServedModel = open_model(self.paths[0], "float32")
        runner = self.model.make_runner(num_blocks=4, block_tokens=8)
        self.live = Live(3, runner.weights)
        self.staging = Staging(self.model.allocate)
        self.channel: WeightSender = sender("shm")
        self.staging.init(self.channel.init())

    def stage(self, version: int, names: set[str], bases: BaseVersions | None) -> list[Message]:
        """Publish some tensors of the second model."""
        tensors = [t for t in named_buffers(self.paths[1]) if t.name in names]
        [update] = self.channel.write(version, tensors)
        return self.send(version, update, bases)

    def send(
        self, version: int, update: UpdateWeights, bases: BaseVersions | None
    ) -> list[Message]:
        self.staging.start(StartWeightUpdate(version=version), self.live)
        self.staging.update(replace(update, base_versions=bases))
        return answers(self.staging)

    def expected(self, names: set[str]) -> WeightStore:
        """Return the second model's tensors of these names, and the first one's otherwise."""
        store = self.model.allocate()
        for path, target in ((self.paths[0], lambda n: True), (self.paths[1], names.__contains__)):
            for name, tensor in read_tensors(path):
                if target(name):
                    store.load(name, tensor)
        return store

    def close(self) -> None:
        self.staging.close()
        self.channel.close()


@pytest.fixture(params=MODEL_TYPES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, request.param)
    yield rig
    rig.close()


@pytest.fixture
def qwen(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, "qwen2")
    yield rig
    rig.close()


def test_part_of_a_set_is_laid_over_the_live_weights_whatever_the_buffer_held(rig: Rig) -> None:
    names = [name for name, _ in read_tensors(rig.paths[1])]
    everything, some = set(names), set(names[1:4])
    assert isinstance(rig.stage(4, everything, None)[0], WeightsStaged)  # and then given up
    [staged] = rig.stage(4, some, BaseVersions(2, 3))
    assert isinstance(staged, WeightsStaged)
    assert_same(rig.staging.swap(4, rig.live.weights), rig.expected(some))
    assert_same(rig.live.weights, rig.expected(set()))


def test_a_part_follows_one_that_failed(qwen: Rig) -> None:
    assert isinstance(qwen.stage(4, {"model.norm.weight"}, None)[0], WeightsFailed)
    some = {"model.layers.0.mlp.down_proj.weight"}
    assert isinstance(qwen.stage(4, some, BaseVersions(3, 3))[0], WeightsStaged)
    assert_same(qwen.staging.swap(4, qwen.live.weights), qwen.expected(some))


@pytest.mark.parametrize("bases", [BaseVersions(0, 2), BaseVersions(4, 9)])
def test_a_part_made_for_other_weights_is_refused(qwen: Rig, bases: BaseVersions) -> None:
    assert qwen.stage(10, {"model.norm.weight"}, bases) == [
        WeightsFailed(
            version=10,
            message=f"v10 is a partial set on top of v{bases.first} to "
            f"v{bases.last}, and this engine serves v3; publish a whole state dict",
        )
    ]


def test_a_tied_head_without_its_embedding_is_refused_and_not_ignored(qwen: Rig) -> None:
    [update] = qwen.channel.write(4, buffers_of({"lm_head.weight": torch.zeros(96, 64)}))
    assert qwen.send(4, update, BaseVersions(3, 3)) == [
        WeightsFailed(
            version=4,
            message="lm_head.weight is tied to model.embed_tokens.weight, which isn't published "
            "with it; publish model.embed_tokens.weight too",
        )
    ]


def test_an_empty_part_is_the_version_before(qwen: Rig) -> None:
    nothing = UpdateWeights(version=4, location="", tensors=[])
    assert isinstance(qwen.send(4, nothing, BaseVersions(3, 3))[0], WeightsStaged)
    assert_same(qwen.staging.swap(4, qwen.live.weights), qwen.expected(set()))


def test_a_byte_changed_on_the_way_is_refused_with_the_tensors_name_and_both_sums(
    qwen: Rig,
) -> None:
    tensors = named_buffers(qwen.paths[1])
    sums = checksums(tensors)
    [update] = with_checksums(qwen.channel.write(4, tensors), sums)
    assert isinstance(qwen.send(4, update, None)[0], WeightsStaged)
    spec = update.tensors[5]
    with open(update.location, "r+b") as segment:
        byte = os.pread(segment.fileno(), 1, spec.offset + 7)
        os.pwrite(segment.fileno(), bytes([byte[0] ^ 16]), spec.offset + 7)
    # As an engine that maps the segment now: private pages that were read keep what they had.
    qwen.staging.init(qwen.channel.init())
    [failed] = qwen.send(4, update, None)
    assert isinstance(failed, WeightsFailed)
    assert f"tensor {spec.name!r} has the checksum 0x" in failed.message
    assert f"but {sums[spec.name]:#010x} was sent" in failed.message
    assert not qwen.staging.is_staged(4)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_what_was_rounded_and_is_not_published_again_stays_the_same_to_the_bit(
    tmp_path: Path, model_type: str, quantization: Quantization
) -> None:
    path = make_model_directory(tmp_path, model_type)
    model = open_model(path, "bfloat16", quantization=quantization)
    whole, laid_over = model.allocate(), model.allocate()
    fill_from_directory(whole, path)
    for tensor in laid_over.tensors():
        tensor.zero_()
    laid_over.start()
    laid_over.complete_from(whole)
    for mine, its in zip(laid_over.tensors(), whole.tensors(), strict=True):
        assert torch.equal(mine, its)
