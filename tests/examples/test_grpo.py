"""Tests that a GRPO step in parts equals one over all rows at once, padded."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import grpo
from tests.models import make_model_directory

LENGTHS = torch.tensor([30, 4, 17, 60, 9, 58])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "tiny")


def a_batch() -> Any:
    """Rows of very different lengths; the second has no advantage."""
    numbers = torch.Generator().manual_seed(0)
    is_token = torch.arange(60) < LENGTHS[:, None]  # [R, T]
    is_sampled = is_token & (torch.rand(6, 60, generator=numbers) < 0.4)
    is_sampled[:, 0] = False
    token_ids = torch.randint(6, 20, (6, 60), generator=numbers) * is_token
    versions = torch.randint(0, 3, (6, 60), generator=numbers)
    return SimpleNamespace(
        token_ids=token_ids,
        attention_mask=is_token,
        loss_mask=is_sampled,
        logprobs=torch.where(is_sampled, -3.0, 0.0),
        weight_versions=torch.where(is_sampled, versions, -1),
        advantages=torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0, -0.5]),
        sampled_tokens=int(is_sampled.sum()),
        trainer_version=2,
    )


@pytest.mark.parametrize("tokens_together", [1, 100, 120])
def test_the_gradient_is_that_of_all_rows_at_once(
    small: Path, monkeypatch: pytest.MonkeyPatch, tokens_together: int
) -> None:
    model, optimizer = grpo.load_trainer(small, 1e-3)
    at_once = copy.deepcopy(model)
    batch = a_batch()
    monkeypatch.setattr(grpo, "TOKENS_TOGETHER", 10_000)
    its_optimizer = torch.optim.AdamW(at_once.parameters(), lr=0.0)
    wanted = grpo.train_step(at_once, its_optimizer, batch)
    monkeypatch.setattr(grpo, "TOKENS_TOGETHER", tokens_together)
    seen = grpo.train_step(model, optimizer, batch)

    assert wanted is not None
    assert seen is not None
    assert seen.k3 == pytest.approx(wanted.k3, rel=1e-5)
    assert len(seen.by_lag) == len(wanted.by_lag)
    for mine, theirs in zip(model.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)


def test_only_the_last_layers_change_and_they_are_what_is_published(small: Path) -> None:
    model, optimizer = grpo.load_trainer(small, 1e-3, last_layers=1)
    before = copy.deepcopy(model.state_dict())
    grpo.train_step(model, optimizer, a_batch())
    changed = {name for name, each in model.state_dict().items() if (each != before[name]).any()}

    assert changed
    published = grpo.trained_weights(model)
    assert changed <= published.keys()
    assert {name.split(".")[2] for name in published} == {str(model.config.num_hidden_layers - 1)}
    assert {each.dtype for each in published.values()} == {model.dtype}


@pytest.mark.parametrize(("flags", "computed"), [("avx2", "float32"), ("avx512_bf16", "bfloat16")])
def test_the_last_layers_of_a_bfloat16_model_are_published_in_its_type_however_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, computed: str
) -> None:
    model = make_model_directory(tmp_path / "model", dtype="bfloat16")
    monkeypatch.setattr(grpo, "processor", lambda: f"flags : {flags}")
    policy, _ = grpo.load_trainer(model, 1e-3, last_layers=1)
    assert policy.dtype == getattr(torch, computed)
    assert {each.dtype for each in grpo.trained_weights(policy).values()} == {torch.bfloat16}


def test_rows_without_a_token_to_train_on_begin_where_logits_can() -> None:
    batch = a_batch()
    rows = torch.tensor([0, 1])
    trained = int(batch.loss_mask[rows].any(0).nonzero()[0])
    assert grpo.first_trained(batch, rows) == trained
    batch.loss_mask[rows] = False
    assert grpo.first_trained(batch, rows) == 1


def test_with_a_limit_the_rows_of_the_largest_advantages_are_trained(small: Path) -> None:
    model, optimizer = grpo.load_trainer(small, 1e-3)
    limited = copy.deepcopy(model)
    batch = a_batch()
    its_optimizer = torch.optim.AdamW(limited.parameters(), lr=0.0)
    grpo.train_step(limited, its_optimizer, batch, rows_max=3)
    batch.advantages = torch.tensor([1.0, 0.0, -1.0, 0.0, 2.0, 0.0])
    grpo.train_step(model, optimizer, batch)

    for mine, theirs in zip(model.parameters(), limited.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_micro_batches_group_rows_of_similar_length_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.tensor([0, 2, 3, 4, 5])
    for tokens, parts in (
        (10_000, [[3, 5, 0, 2, 4]]),
        (120, [[3, 5], [0, 2, 4]]),
        (1, [[3], [5], [0], [2], [4]]),
    ):
        monkeypatch.setattr(grpo, "TOKENS_TOGETHER", tokens)
        assert [part.tolist() for part in grpo.rows_of_like_length(a_batch(), rows)] == parts
