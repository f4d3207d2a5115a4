"""Token attachments through whole runs: from engines over the wire into the trainer's batch."""

import copy
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tidegate
from tests.models import make_model_directory
from tests.observability.sampled_runs import edit_rollout
from tidegate.errors import ConfigError
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.trajectories import read_trajectories
from tidegate.policies.routing_replay import record_routed_experts

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 2,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
    "max_staleness": 2,
}


def load(model: Path) -> Any:
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return module.eval()


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    """Generate, observe, and generate again, so that the prefix is reported twice."""
    episode.append([10 + task, 11, 12])
    await episode.generate(max_tokens=9, stop_token_ids=[])
    episode.append([20, 21])
    await episode.generate(max_tokens=7, stop_token_ids=[])
    return float(task % 2)


def perturbed(module: Any, by: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return dict(module.state_dict())


async def batches_of(
    rollouts: tidegate.Rollouts, module: Any, *, by: float
) -> AsyncIterator[tidegate.Batch]:
    """Yield batches, publishing changed weights after each."""
    async for batch in rollouts.batches(range(40), episode=two_turns):
        yield batch
        await rollouts.publish(perturbed(module, by))
        if batch.number == 4:
            return


async def test_a_batch_has_the_experts_of_every_position_that_was_computed(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "moe", "qwen3_moe")
    module = load(model)
    run = tmp_path / "run"
    async with tidegate.serve(
        model=model, **SMALL, attachments=["routed_experts"], run_directory=run
    ) as rollouts:
        async for batch in batches_of(rollouts, module, by=0.0):
            experts, known = batch.routed_experts, batch.routed_experts_mask
            assert experts is not None
            assert known is not None
            rows, tokens = batch.token_ids.shape
            config = module.config
            assert experts.shape == (
                rows,
                tokens,
                config.num_hidden_layers,
                config.num_experts_per_tok,
            )
            assert experts.dtype == torch.uint8
            lengths = batch.attention_mask.sum(1)
            assert torch.equal(known.sum(1), lengths - 1)  # all but the row's last token
            with torch.no_grad(), record_routed_experts(module) as recorder:
                module(batch.token_ids, attention_mask=batch.attention_mask)
            own = recorder.routed_experts().view(experts.shape).sort(-1).values[known]
            assert (own == experts[known].long().sort(-1).values).all(-1).float().mean() > 0.99
            with torch.no_grad(), tidegate.replay_routed_experts(module, experts, known):
                logits = module(batch.token_ids, attention_mask=batch.attention_mask).logits
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])
            difference = (logprobs[..., 0] - batch.logprobs[:, 1:]).abs()
            assert difference[batch.loss_mask[:, 1:]].max() < 1e-4
    first = next(iter(read_trajectories(run)))
    assert [len(report.entries) for turn in first.turns for report in turn.routed_experts or ()]
    report = audit_run(run)
    assert report.agrees, report.lines()


async def test_positions_that_new_weights_recompute_have_their_experts_by_version(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "moe", "qwen3_moe")
    turns: list[tidegate.GeneratedTurn] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        turns.append(await episode.generate(max_tokens=120, stop_token_ids=[]))
        return 0.0

    module = load(model)
    async with tidegate.serve(
        model=model,
        **SMALL | {"engines": 1},
        attachments=["routed_experts"],
        kv_policy="recompute",
        pause_mode="keep",
        run_directory=tmp_path / "run",
    ) as rollouts:
        async for _ in rollouts.batches(range(8), episode=solve):
            await rollouts.publish(perturbed(module, 0.1))
    mixed = [turn for turn in turns if len({span.version for span in turn.spans}) > 1]
    assert mixed
    for turn in mixed:
        reports = turn.routed_expert_reports
        assert len(reports) > 1
        newest = turn.routed_experts
        assert newest is not None
        assert len(newest) == turn.start + len(turn.token_ids) - 1
        assert any(
            (report.entries[: len(newest)] != newest[: len(report.entries)]).any()
            for report in reports
            if report.start == 0
        )
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()


async def test_log_probs_over_a_batchs_kept_tokens_are_the_engines(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    module = load(model)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        await episode.generate(max_tokens=9, temperature=0.7, top_p=0.8, stop_token_ids=[])
        turn = await episode.generate(
            max_tokens=9, temperature=0.7, top_k=5, min_p=0.05, stop_token_ids=[]
        )
        assert turn.kept_tokens is not None
        assert all(1 <= len(kept) <= 5 for kept in turn.kept_tokens)
        assert all(t in kept for t, kept in zip(turn.token_ids, turn.kept_tokens, strict=True))
        plain = await episode.generate(max_tokens=3, temperature=0.7, stop_token_ids=[])
        assert plain.kept_tokens == [[], [], []]
        return float(task % 2)

    run = tmp_path / "run"
    settings = SMALL | {"max_staleness": 0}
    async with tidegate.serve(
        model=model, **settings, attachments=["kept_tokens"], run_directory=run
    ) as rollouts:
        async for batch in rollouts.batches(range(8), episode=solve):
            assert batch.kept_ids is not None
            assert batch.kept_counts is not None
            with torch.no_grad():
                logits = module(batch.token_ids, attention_mask=batch.attention_mask).logits
            logprobs = tidegate.kept_logprobs(
                logits[:, :-1],
                batch.token_ids[:, 1:],
                batch.kept_ids,
                batch.kept_counts[:, 1:],
                temperature=0.7,
            )
            mask = batch.loss_mask[:, 1:]
            assert (logprobs - batch.logprobs[:, 1:])[mask].abs().max() < 1e-4
            await rollouts.publish(dict(module.state_dict()))
    report = audit_run(run)
    assert report.agrees, report.lines()
    for falsify in (lambda kept: kept[:-1], lambda kept: [*kept, 94]):
        copy = shutil.copytree(run, tmp_path / "copy")
        first = next(iter(read_trajectories(copy)))
        edit_rollout(copy, first.rollout_id, partial(falsify_a_set, falsify))
        report = audit_run(copy)
        assert not report.agrees
        assert any("recorded kept tokens, first token" in str(p) for p in report.problems)
        shutil.rmtree(copy)


async def test_a_batch_has_top_tokens_hidden_states_and_a_teachers_log_probs(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    teacher_model = make_model_directory(tmp_path / "teacher", "qwen3", seed=5)
    module, teacher_module = load(model), load(teacher_model)
    head = module.get_output_embeddings().weight.detach().clone()

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        await episode.generate(max_tokens=60, stop_token_ids=[], top_logprobs=3, hidden_states=True)
        branch = episode.branch([20, 21], "another try")
        await branch.generate(max_tokens=4, stop_token_ids=[])
        await episode.attach_teacher(teacher, top_logprobs=2)
        return float(task % 2)

    run = tmp_path / "run"
    mixed = 0
    async with (
        tidegate.score_server(model=teacher_model) as teacher,
        tidegate.serve(
            model=model, **SMALL, pause_mode="abort", step_time_min_s=0.01, run_directory=run
        ) as rollouts,
    ):
        async for batch in rollouts.batches(range(12), episode=solve):
            versions = batch.weight_versions.masked_fill(~batch.loss_mask, 99)
            mixed += int((versions.amin(1) < batch.weight_versions.amax(1)).sum())
            check_scores(batch, teacher_module, head)
            await rollouts.publish(perturbed(module, 0.0) | {"model.norm.weight": norm(module)})
    assert mixed  # turns that continued after an abort, perhaps on the other engine
    recorded = [turn for row in read_trajectories(run) for turn in row.turns if turn.length == 60]
    assert recorded
    for turn in recorded:
        assert turn.teacher_logprobs is not None
        assert turn.teacher_top_ids is not None
        assert turn.top_ids is not None
        assert turn.hidden_states is not None
        counts = len(turn.teacher_logprobs), len(turn.teacher_top_ids), len(turn.top_ids)
        assert counts == (60, 120, 180)
        assert len(turn.hidden_states) == 60 * 4 * head.shape[1]


async def test_a_teacher_may_read_another_prompt_and_be_the_policy_itself(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    module = load(model)
    checked = 0

    async def solve(episode: tidegate.Episode, task: int) -> float:
        nonlocal checked
        episode.append([10 + task])
        await episode.generate(max_tokens=5, stop_token_ids=[])
        episode.append([20, 21])
        await episode.generate(max_tokens=3, stop_token_ids=[])
        asked = [{"role": "user", "content": "abc"}]
        await episode.attach_teacher(messages=asked)
        prompt = await episode.conversation.prompt_tokens(asked, None)
        context = [*prompt, *episode.token_ids[1:]]
        with torch.no_grad():
            logprobs = module(torch.tensor([context])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(context[1:])[:, None])[:, 0]
        at = len(prompt) - 1
        for turn, start, tokens in zip(episode.turns, (at, at + 7), (5, 3), strict=True):
            assert turn.teacher_scores is not None
            found = torch.from_numpy(turn.teacher_scores.logprobs.copy())
            torch.testing.assert_close(found, expected[start : start + tokens], atol=1e-4, rtol=0)
            checked += tokens
        branch = episode.branch([20, 21], "another try")
        await branch.generate(max_tokens=1, stop_token_ids=[])
        with pytest.raises(ConfigError, match="has branches"):
            await episode.attach_teacher(messages=asked)
        return float(task % 2)

    async with tidegate.serve(model=model, **SMALL | {"max_staleness": 0}) as rollouts:
        await rollouts.evaluate([1, 2], episode=solve)
    assert checked == 16


async def test_a_task_has_its_own_teacher_which_may_be_an_older_version_of_the_policy(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    frozen_model = make_model_directory(tmp_path / "frozen", "qwen3", seed=5)
    module, frozen_module = load(model), load(frozen_model)
    given = [copy.deepcopy(module)]  # every second version of the policy, by the teacher's version

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10 + task, 11, 12])
        turn = await episode.generate(max_tokens=9, stop_token_ids=[])
        await episode.attach_teacher(frozen if task % 2 else lagging)
        assert turn.teacher_scores is not None
        return float(turn.teacher_scores.version)

    seen: set[int] = set()
    settings = SMALL | {"engines": 1, "max_staleness": 0}
    async with (
        tidegate.score_server(model=frozen_model) as frozen,
        tidegate.serve(model=model, engines=1) as lagging,
        tidegate.serve(model=model, **settings) as rollouts,
    ):
        async for batch in rollouts.batches(range(12), episode=solve):
            assert batch.teacher_logprobs is not None
            for row, (task, version) in enumerate(
                zip(batch.tasks, batch.rewards.int().tolist(), strict=True)
            ):
                assert isinstance(task, int)
                teacher = frozen_module if task % 2 else given[version]
                mask, tokens = batch.loss_mask[row, 1:], batch.token_ids[row : row + 1]
                with torch.no_grad():
                    logprobs = teacher(tokens).logits[0, :-1].log_softmax(-1)
                expected = logprobs.gather(-1, tokens[0, 1:, None])[:, 0][mask]
                found = batch.teacher_logprobs[row, 1:][mask]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
                newest = int(batch.weight_versions[row, 1:][mask].max())
                if task % 2 == 0 and newest > 2 * version:
                    seen.add(version)
                    assert (batch.logprobs[row, 1:][mask] - found).abs().max() > 1e-3
            state = perturbed(module, 0.02)
            if await rollouts.publish(state) % 2 == 0:
                given.append(copy.deepcopy(module))
                await lagging.publish(state)
    assert seen == {0, 1, 2}  # the policy moved on, and the teacher after it


def norm(module: Any) -> torch.Tensor:
    """Return a changed last norm, so that versions differ and the head stays."""
    weight: torch.Tensor = module.model.norm.weight.data
    weight *= 1.2
    return weight.clone()


def check_scores(batch: tidegate.Batch, teacher: Any, head: torch.Tensor) -> None:
    """Compare a batch's columns with the teacher's forward pass, and with the head's product."""
    with torch.no_grad():
        logits = teacher(batch.token_ids, attention_mask=batch.attention_mask).logits
    logprobs = logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, batch.token_ids[:, 1:, None])[..., 0]
    mask = batch.loss_mask[:, 1:]
    assert batch.teacher_logprobs is not None
    assert batch.teacher_top_logprobs is not None
    assert batch.top_logprobs is not None
    assert batch.hidden_states is not None
    torch.testing.assert_close(
        batch.teacher_logprobs[:, 1:][mask], expected[mask], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        batch.teacher_top_logprobs[:, 1:][mask], logprobs.topk(2).values[mask], atol=1e-4, rtol=0
    )
    asked = batch.top_logprobs.isfinite().all(-1)
    assert asked.sum(1).max() == 60
    own = (batch.hidden_states[asked] @ head.T).log_softmax(-1)
    torch.testing.assert_close(own.topk(3).values, batch.top_logprobs[asked], atol=1e-4, rtol=0)
    sampled = own.gather(-1, batch.token_ids[asked][:, None])[:, 0]
    torch.testing.assert_close(sampled, batch.logprobs[asked], atol=1e-4, rtol=0)


def falsify_a_set(change: Callable[[list[int]], list[int]], row: dict[str, Any]) -> None:
    """Change the kept set of the first token whose set has several tokens."""
    for turn in row["turns"]:
        for index, kept in enumerate(turn["kept_ids"]):
            if len(kept) > 1:
                turn["kept_ids"][index] = change(kept)
                return


async def test_a_model_without_a_mixture_says_so_to_the_episode(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    reasons: list[str] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([10, 11])
        with pytest.raises(tidegate.TidegateError) as refused:
            await episode.generate(max_tokens=3, routed_experts=True)
        reasons.append(str(refused.value))
        return 0.0

    async with tidegate.serve(model=model, **SMALL) as rollouts:
        await rollouts.evaluate([1], episode=solve)
    assert "has no mixture-of-experts layers" in reasons[0]
