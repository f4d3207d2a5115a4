"""Patches change the elements that they name, as if whole tensors had come; others are refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace

from tests.engine.weights.test_staging import answers, assert_same
from tests.models import make_model_directory
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_weights import Quantization, fill_from_directory
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.weights.staging import Live, Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.orchestrator.weight_sync.deltas import WrittenElements
from tidegate.orchestrator.weight_sync.state_dict import named_buffers as buffers_of
from tidegate.transport.messages import (
    BaseVersions,
    Message,
    StartWeightUpdate,
    TensorSpec,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import WeightSender, sender
from tidegate.transport.weight_channels.patches import decode_patch

State = dict[str, torch.Tensor]


class Rig:
    """An engine's staging, and a trainer that publishes patches to it over shared memory."""

    def __init__(
        self,
        root: Path,
        model_type: str = "qwen2",
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        *,
        quantization: Quantization | None = None,
        tied: bool = False,
    ) -> None:
        self.path = make_model_directory(root / model_type, model_type, tied=tied)
        self.model = open_model(self.path, dtype, quantization=quantization)
        runner = self.model.make_runner(num_blocks=4, block_tokens=8)
        self.live = Live(0, runner.weights)
        self.staging = Staging(self.model.allocate)
        self.channel: WeightSender = sender("shm")
        self.staging.init(self.channel.init())
        self.written = WrittenElements()
        self.state: State = {
            name: tensor.to(torch.bfloat16) for name, tensor in read_tensors(self.path)
        }
        self.noise = torch.Generator().manual_seed(0)
        self.version = 0
        self.patched_names: set[str] = set()

    def train(self, share: float = 0.02) -> None:
        """Change some elements of every tensor by one unit in the last place."""
        for tensor in self.state.values():
            chosen = torch.rand(tensor.shape, generator=self.noise) < share
            tensor.view(torch.int16)[chosen] += 1

    def write(self) -> tuple[UpdateWeights, BaseVersions | None]:
        """Write the state as the next version: what changed, or all of it."""
        before, self.version = self.version, self.version + 1
        buffers = buffers_of(self.state)
        changed = self.written.changed(self.version, buffers, before=before, has_checksums=True)
        bases = None if changed is None else BaseVersions(before, before)
        [update] = self.channel.write(self.version, buffers if changed is None else changed)
        self.patched_names = {spec.name for spec in update.tensors if spec.patch is not None}
        return update, bases

    def stage(self, update: UpdateWeights, bases: BaseVersions | None) -> Message:
        self.staging.start(StartWeightUpdate(version=self.version), self.live)
        self.staging.update(replace(update, base_versions=bases))
        [answer] = answers(self.staging)
        return answer

    def publish(self) -> Message:
        """Stage the state as the next version, and swap it in."""
        answer = self.stage(*self.write())
        if isinstance(answer, WeightsStaged):
            weights = self.staging.swap(self.version, self.live.weights)
            self.live = Live(self.version, weights)
        return answer

    def publish_at_once(self, versions: int, live: Live | None) -> WeightStore:
        """Publish the next versions as one update that follows ``live``, training after each.

        Returns the weights that the last of them should give.
        """
        updates: list[UpdateWeights] = []
        bases = None if live is None else BaseVersions(live.version, live.version)
        for _ in range(versions):
            before, self.version = self.version, self.version + 1
            buffers = buffers_of(self.state)
            changed = self.written.changed(self.version, buffers, before=before)
            assert (changed is None) == (before == 0)
            updates += self.channel.write(
                self.version, changed or buffers, keep=range(self.version)
            )
            expected = self.expected()
            self.train()
        self.staging.start(StartWeightUpdate(version=self.version), live)
        for update in updates:
            is_last = update is updates[-1]
            self.staging.update(
                replace(update, version=self.version, base_versions=bases, is_last=is_last)
            )
        [answer] = answers(self.staging)
        assert isinstance(answer, WeightsStaged)
        self.live = Live(self.version, self.staging.swap(self.version, self.live.weights))
        return expected

    def expected(self) -> WeightStore:
        """Return weights into which the whole state was loaded."""
        weights = self.model.allocate()
        weights.start()
        for name, tensor in self.state.items():
            weights.load(name, tensor)
        return weights

    def close(self) -> None:
        self.staging.close()
        self.channel.close()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs that are closed after the test."""
    with ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Rig:
            return stack.enter_context(closing(Rig(tmp_path, *args, **kwargs)))

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_patches_in_a_row_give_the_bits_of_whole_sets(
    make_rig: Callable[..., Rig], model_type: str, dtype: str
) -> None:
    rig = make_rig(model_type, dtype)
    for number in range(5):
        assert isinstance(rig.publish(), WeightsStaged)
        assert bool(rig.patched_names) == (number > 0)
        assert_same(rig.live.weights, rig.expected())
        rig.train()


def test_the_buffer_catches_up_by_the_last_patches_or_by_a_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    become = WeightStore.become

    def count(self: WeightStore, other: WeightStore) -> None:
        copies.append(1)
        become(self, other)

    monkeypatch.setattr(WeightStore, "become", count)
    for _ in range(4):  # a whole set, then patches: the first finds an older version
        rig.publish()
        rig.train()
    assert len(copies) == 1
    update, bases = rig.write()
    rig.staging.start(StartWeightUpdate(version=rig.version), rig.live)
    rig.staging.abandon()
    assert isinstance(rig.stage(update, bases), WeightsStaged)
    assert len(copies) == 1  # what was abandoned had not touched the buffer
    assert isinstance(rig.stage(update, bases), WeightsStaged)
    assert len(copies) == 2  # what was staged has
    rig.live = Live(rig.version, rig.staging.swap(rig.version, rig.live.weights))
    assert_same(rig.live.weights, rig.expected())


def test_a_tensor_that_comes_whole_before_the_first_patch_keeps_its_new_elements(rig: Rig) -> None:
    rig.publish()
    rig.train()
    before, rig.version = rig.version, rig.version + 1
    buffers = buffers_of(rig.state)
    patched = rig.written.changed(rig.version, buffers, before=before)
    assert patched is not None
    [update] = rig.channel.write(rig.version, [buffers[0], *patched[1:]])
    assert [spec.patch is None for spec in update.tensors[:2]] == [True, False]
    assert isinstance(rig.stage(update, BaseVersions(before, before)), WeightsStaged)
    assert_same(rig.staging.swap(rig.version, rig.live.weights), rig.expected())


def test_an_engine_that_lacked_two_versions_catches_up_exactly_at_the_next_one(rig: Rig) -> None:
    for _ in range(2):
        rig.publish()
        rig.train()
    expected = rig.publish_at_once(2, rig.live)
    assert_same(rig.live.weights, expected)
    assert isinstance(rig.publish(), WeightsStaged)  # its buffer is still of version 2
    assert_same(rig.live.weights, rig.expected())


def test_a_whole_set_and_patches_after_it_come_in_one_update(rig: Rig) -> None:
    expected = rig.publish_at_once(3, None)
    assert_same(rig.live.weights, expected)


def refusal(answer: Message) -> str:
    assert isinstance(answer, WeightsFailed)
    return answer.message


def test_a_patch_of_other_weights_is_refused_by_the_checksum_of_its_result(rig: Rig) -> None:
    rig.publish()
    rig.train()
    other = next(rig.live.weights.tensors())
    other.view(-1)[:64] += 1
    assert "this engine patched other weights" in refusal(rig.publish())


def test_a_patch_that_makes_a_tensor_infinite_is_refused_and_the_next_set_is_whole(
    rig: Rig,
) -> None:
    rig.publish()
    good = {name: tensor.clone() for name, tensor in rig.state.items()}
    rig.state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("inf")
    assert "NaN or infinity" in refusal(rig.publish())
    rig.state, rig.version = good, rig.version + 1
    update, _ = rig.write()
    assert all(spec.patch is None for spec in update.tensors)


@pytest.mark.parametrize("tied_head", ["same", "other"])
def test_patches_of_tied_tensors_must_be_equal(
    make_rig: Callable[..., Rig], tied_head: str
) -> None:
    rig = make_rig(tied=True)
    embedding = rig.state["model.embed_tokens.weight"]
    rig.state["lm_head.weight"] = embedding.clone()
    assert isinstance(rig.publish(), WeightsStaged)
    rig.train()
    if tied_head == "same":
        rig.state["lm_head.weight"] = embedding.clone()
        assert isinstance(rig.publish(), WeightsStaged)
        assert "lm_head.weight" in rig.patched_names
    else:
        assert "lm_head.weight differs from" in refusal(rig.publish())


def test_elements_that_an_engine_stores_rounded_are_refused_by_name(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(quantization="int8")
    rig.publish()
    rig.train()
    why = refusal(rig.publish())
    assert "can't be patched, because torch.bfloat16 elements are stored rounded" in why
    assert "set weight_deltas to True or False" in why


def test_each_rank_changes_the_elements_of_its_own_slices(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path / "model", "qwen2", tied=False)
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in read_tensors(path)}
    for rank in range(2):
        model = open_model(path, "bfloat16", shard=TensorShard(rank, 2))
        mine, expected = model.allocate(), model.allocate()
        fill_from_directory(mine, path)
        written = WrittenElements()
        state = {name: tensor.clone() for name, tensor in whole.items()}
        for tensors in (mine, expected):
            tensors.start()
            for name, tensor in state.items():
                tensors.load(name, tensor)
        written.changed(1, buffers_of(state), before=0)
        for tensor in state.values():
            tensor.view(torch.int16).view(-1)[::31] += 1
        patched = written.changed(2, buffers_of(state), before=1)
        assert patched is not None
        for buffer in patched:
            spec = TensorSpec(
                buffer.name,
                buffer.dtype,
                list(buffer.shape),
                0,
                len(buffer.data),
                None,
                buffer.patch,
            )
            mine.patch(buffer.name, torch.bfloat16, decode_patch(spec, buffer.data))
        expected.start()
        for name, tensor in state.items():
            expected.load(name, tensor)
        assert_same(mine, expected)
