"""Bit-exact audits of real deterministic runs, and what they find that log-probs alone do not."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import tidegate
from examples.grpo import load_trainer, train_step
from examples.worker_grpo import VOCABULARY, make_model
from tests.models import make_model_directory
from tests.observability.sampled_runs import Row, edit_rollout, move_boundary
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter
from tidegate.errors import AuditError
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.audit.exact import _Context, _find_leaders
from tidegate.observability.audit.replay_plan import Replay
from tidegate.observability.records.recording import read_trajectories
from tidegate.transport.messages import KvSpan

pytestmark = pytest.mark.wire

LEARNING_RATE = 1e-6
"""One step changes log-probs by about 1e-5 nats, a tenth of the audit's tolerance."""


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    episode.append(task)
    options: dict[str, Any] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"min_p": 0.01, "frequency_penalty": 0.5, "top_logprobs": 2},
        {"temperature": 0.0, "min_tokens": 24},
    ][task[0] % 4]
    turn = await episode.generate(max_tokens=24, **options)
    episode.append(task)
    await episode.generate(max_tokens=8)
    return sum(token < VOCABULARY // 2 for token in turn.token_ids) / 24


def train(
    directory: Path, *, deterministic: bool, dtype: Literal["float32", "bfloat16"] = "float32"
) -> Path:
    path, run = directory / "model", directory / "run"
    make_model(path)
    model, optimizer = load_trainer(path, LEARNING_RATE)
    tasks = torch.randint(VOCABULARY, (16, 3), generator=torch.Generator().manual_seed(5)).tolist()
    with tidegate.serve_sync(
        model=path,
        engines=2,
        dtype=dtype,
        deterministic=deterministic,
        max_running_turns=8,
        max_staleness=2,
        group_size=4,
        groups_per_batch=4,
        pause_mode="keep",
        kv_policy="keep",
        step_time_min_s=0.05,  # so that publishes come in the middle of turns
        run_directory=run,
    ) as rollouts:
        for batch in rollouts.batches(tasks, episode=solve):
            train_step(model, optimizer, batch)
            rollouts.publish(model.state_dict())
    return run


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def honest_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return train(tmp_path_factory.mktemp("run"), deterministic=True, dtype=request.param)


@pytest.fixture
def run(honest_run: Path, tmp_path: Path) -> Path:
    """A copy of the correct run, to be falsified."""
    return shutil.copytree(honest_run, tmp_path / "run")


def test_a_deterministic_run_is_sampled_again_to_the_bit_across_weight_updates(
    honest_run: Path,
) -> None:
    report = audit_run(honest_run, exact=True)

    assert [str(problem) for problem in report.problems] == []
    assert report.agrees
    assert report.tokens_agreeing == report.tokens == 16 * 4 * (24 + 8)
    assert report.versions > 1
    assert report.spans_mixed > 0
    assert any("agree to the bit" in line for line in report.lines())


def test_an_exact_audit_notices_each_wrong_tag_of_a_small_step_that_changes_a_bit(
    honest_run: Path,
) -> None:
    report = audit_run(honest_run, exact=True)
    for power in (report.version_power, report.boundary_power, report.kv_power):
        assert power.tags_tried > 0
        assert power.missed_share == 0
        assert power.unnoticed_share < 0.1  # a single token may have the same bits by chance
        assert power.tags == power.tags_tried
    sampled = audit_run(honest_run, exact=True, wrong_tags_max=9)
    assert 9 <= sampled.version_power.tags_tried < 20
    assert sampled.version_power.tags == report.version_power.tags_tried
    assert sampled.version_power.unnoticed_share_max > 0.1
    assert any("a random sample of" in line for line in sampled.lines())


def mixed_turn(run: Path) -> tuple[int, int]:
    """Return the rollout and the random turn whose boundary between versions is farthest from the
    boundaries beside it."""
    mixed = [
        (min(span.end - span.start for span in turn.spans[:2]), rollout.rollout_id, index)
        for rollout in read_trajectories(run)
        for index, turn in enumerate(rollout.turns)
        if len(turn.spans) > 1 and len(turn.prefills) == 1 and turn.temperature > 0
    ]
    _, rollout_id, turn = max(mixed)
    return rollout_id, turn


def change_seed(row: Row, turn: int) -> None:
    row["turns"][turn]["seed"] += 1


@pytest.mark.parametrize(
    ("lie", "claim"),
    [
        (partial(move_boundary, shift=1), "are those of "),
        (partial(move_boundary, shift=-1), "do not match its weights"),
        (change_seed, "do not match its weights"),
    ],
)
def test_a_tag_that_is_wrong_by_one_token_or_by_its_seed_is_found(
    run: Path, lie: Callable[..., None], claim: str
) -> None:
    rollout_id, turn = mixed_turn(run)
    edit_rollout(run, rollout_id, partial(lie, turn=turn))
    report = audit_run(run, exact=True, wrong_tags_max=1)
    assert not report.agrees
    found = [problem.message for problem in report.problems]
    assert any(claim in message for message in found), found
    assert {(p.rollout_id, p.turn) for p in report.problems} == {(rollout_id, turn)}


async def test_parts_adapters_drafts_kept_tokens_and_rounded_weights_are_replayed_exactly(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model")
    state: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    policy = random_adapter(model, 0)

    async def episode(episode: tidegate.Episode, task: int) -> float:
        episode.append([task % 5 + 1] * 3)
        await episode.generate(max_tokens=12, top_p=0.9, adapter="policy" if task % 2 else "")
        return 0.0

    async with tidegate.serve(
        model=model,
        engines=1,
        deterministic=True,
        quantization="int8",
        speculative_method="lookup",
        attachments=["kept_tokens"],
        group_size=2,
        groups_per_batch=2,
        max_staleness=1,
        run_directory=tmp_path / "run",
    ) as rollouts:
        await rollouts.publish_adapter("policy", policy, config=CONFIG)
        async for batch in rollouts.batches(range(12), episode=episode):
            step = rollouts.version
            if step % 2:
                await rollouts.publish_adapter(
                    "policy",
                    {name: t * (1 + step / 10) for name, t in policy.items()},
                    batches=[batch],
                    config=CONFIG,
                )
            else:
                part = {name: t * 1.01 for name, t in state.items() if "mlp" in name}
                await rollouts.publish(part, batches=[batch], partial=True)
    report = audit_run(tmp_path / "run", exact=True)
    assert report.agrees, report.lines()
    assert report.versions >= 3
    assert report.tokens_agreeing == report.tokens > 12 * 12


def test_a_run_that_was_not_deterministic_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path, deterministic=False)
    with pytest.raises(AuditError, match="was not recorded with deterministic=True"):
        audit_run(run, exact=True)


def test_an_exact_audit_refuses_a_tolerance(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="has no tolerance"):
        audit_run(tmp_path, exact=True, tolerance=0.1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20))
def test_a_prefix_that_contexts_have_in_common_is_computed_once(prompts: list[list[int]]) -> None:
    contexts = [
        _Context(Replay(np.array(prompt, np.int32), [KvSpan(1, 0, len(prompt))], []), [])
        for prompt in prompts
    ]
    _find_leaders(contexts)
    computed = [
        tuple(prompt[: position + 1])
        for prompt, context in zip(prompts, contexts, strict=True)
        for position in range(context.start, len(prompt))
    ]
    assert len(computed) == len(set(computed))
    for prompt, context in zip(prompts, contexts, strict=True):
        if (leader := context.leader) is not None:
            assert leader.wave < context.wave
            assert leader.start < context.start <= len(leader.replay.context)
            assert leader.replay.context[: context.start].tolist() == prompt[: context.start]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=2), st.booleans()), max_size=20))
def test_a_context_takes_of_a_rival_only_what_it_computes_before_its_first_sample(
    drawn: list[tuple[list[int], bool]],
) -> None:
    contexts = [
        _Context(
            Replay(np.array(tokens, np.int32), [KvSpan(1, 0, len(tokens))], [], is_rival=is_rival),
            [],
            drawn={len(tokens) // 2: []},
        )
        for tokens, is_rival in drawn
    ]
    _find_leaders(contexts)
    for context in contexts:
        assert context.start <= min(context.drawn)
        if (leader := context.leader) is not None and leader.replay.is_rival:
            assert context.start <= min(leader.drawn)
