"""A draft model's tensors in a version: beside the policy's, left out as a whole, or ignored."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import make_model_directory
from tidegate.engine.execution.served_model import OwnModel, open_model
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import WeightsRefused
from tidegate.kernels.weight_matrix import published

State = dict[str, torch.Tensor]


@pytest.fixture
def model(tmp_path: Path) -> OwnModel:
    """A model with a draft model, whose head is tied."""
    model = open_model(make_model_directory(tmp_path / "model", tied=False), "float32")
    draft = open_model(make_model_directory(tmp_path / "draft", seed=1), "float32")
    assert isinstance(model, OwnModel)
    assert isinstance(draft, OwnModel)
    model.draft = draft
    return model


@pytest.fixture
def states(model: OwnModel, tmp_path: Path) -> tuple[State, State]:
    """The weights of the two directories, by the names in a publish."""
    own, draft = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "draft"))
    return own, {f"draft.{name}": tensor for name, tensor in draft.items()}


def filled(weights: WeightStore, *states: State) -> WeightStore:
    weights.start()
    for state in states:
        for name, tensor in state.items():
            weights.load(name, tensor)
    return weights


def embedding(weights: WeightStore) -> torch.Tensor:
    assert weights.draft is not None
    return published(weights.draft._copy_targets["model.embed_tokens.weight"].targets[0])


def test_a_whole_set_lacks_a_draft_only_in_part(
    model: OwnModel, states: tuple[State, State]
) -> None:
    own, draft = states
    assert filled(model.allocate(), own).missing() == []
    assert filled(model.allocate(), own, draft).missing() == []
    del draft["draft.model.norm.weight"]
    assert filled(model.allocate(), own, draft).missing() == ["draft.model.norm.weight"]


def test_a_draft_that_was_left_out_is_the_live_one_or_without_it_the_directorys(
    model: OwnModel, states: tuple[State, State]
) -> None:
    own, draft = states
    name = "draft.model.embed_tokens.weight"
    live = filled(model.allocate(), own, {**draft, name: draft[name] + 1})
    for source, expected in ((live, draft[name] + 1), (None, draft[name])):
        weights = filled(model.allocate(), own)
        weights.keep_draft(source)
        assert torch.equal(embedding(weights), expected)
    brought = filled(model.allocate(), own, {**draft, name: draft[name] + 2})
    brought.keep_draft(live)
    assert torch.equal(embedding(brought), draft[name] + 2)


def test_a_drafts_tied_head_must_equal_its_own_embedding(
    model: OwnModel, states: tuple[State, State]
) -> None:
    own, draft = states
    head = draft["draft.model.embed_tokens.weight"]
    weights = filled(model.allocate(), own, draft)
    weights.load("draft.lm_head.weight", head)
    with pytest.raises(
        WeightsRefused,
        match=r"^draft\.lm_head\.weight differs from draft\.model\.embed_tokens\.weight, and the "
        "draft model, Qwen3ForCausalLM of 2 layers, computes",
    ):
        weights.load("draft.lm_head.weight", head + 1)


def test_engines_and_ranks_without_a_draft_model_ignore_its_tensors(
    model: OwnModel, states: tuple[State, State]
) -> None:
    own, draft = states
    model.draft = None
    weights = filled(model.allocate(), own, draft)
    assert weights.missing() == []
    weights.complete_from(filled(model.allocate(), own))
