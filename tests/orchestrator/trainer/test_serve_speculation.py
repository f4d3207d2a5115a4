"""Tests of speculative decoding in a whole run, from the setting to the audit and the report."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tidegate
from tests.models import make_model_directory
from tests.repeating import make_repeating_model
from tidegate.engine.drafts.draft_sources import open_drafts
from tidegate.engine.drafts.rollouts import RolloutDrafts
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import ConfigError, TidegateError, WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.reports.report import write_report

pytestmark = pytest.mark.wire

FILE = "model.safetensors"

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


async def solve(episode: tidegate.Episode, task: int) -> float:
    episode.append([task, 10, 11, 12, 13])
    turn = await episode.generate(max_tokens=60, stop_token_ids=[])
    return float(len(turn.token_ids))


async def test_accepted_draft_tokens_are_audited_counted_and_reported(tmp_path: Path) -> None:
    model, run = make_repeating_model(tmp_path / "model"), tmp_path / "run"
    async with tidegate.serve(
        model=model, **SMALL, run_directory=run, speculative_method=f"draft:{model}"
    ) as rollouts:
        async for batch in rollouts.batches(range(4), episode=solve):
            assert batch.loss_mask.sum() == 4 * 60
        (engine,) = rollouts.statistics().engines
    assert engine.speculative_method == "draft"
    assert 0 < engine.accepted_draft_tokens == engine.draft_tokens  # by a model as good as itself
    assert engine.tokens == 8 * 60
    report = audit_run(run)
    assert report.agrees, report.lines()
    page = write_report(run).read_text()
    assert f"| draft tokens verified | {engine.draft_tokens}, " in page


async def test_an_unknown_draft_source_is_refused(tmp_path: Path) -> None:
    model = make_repeating_model(tmp_path / "model")
    with pytest.raises(TidegateError, match="speculative_method must be"):
        async with tidegate.serve(model=model, **SMALL, speculative_method="tea leaves"):
            pass


def test_a_draft_model_of_another_vocabulary_or_that_transformers_computes_is_refused(
    tmp_path: Path,
) -> None:
    model = open_model(make_repeating_model(tmp_path / "model"), "auto")
    other = make_model_directory(tmp_path / "other", vocab_size=50)
    limits = EngineLimits(
        max_running_turns=1,
        max_step_tokens=1,
        num_blocks=1,
        block_tokens=4,
        context_tokens_max=8,
        vocab_size=model.vocab_size,
    )
    runner = model.make_runner(num_blocks=1, block_tokens=4)
    with pytest.raises(ConfigError, match=r"50 tokens, the model's 96; take a smaller model"):
        open_drafts(f"draft:{other}", model, limits, "auto", runner)
    slow = make_model_directory(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match="transformers computes GPT2LMHeadModel one token at a"):
        open_drafts(f"draft:{slow}", model, limits, "auto", runner)
    assert isinstance(open_drafts("rollouts", model, limits, "auto", runner), RolloutDrafts)


State = dict[str, torch.Tensor]


def two_models(path: Path) -> tuple[Path, Path, State, State]:
    """Return a model that repeats tokens and one that never does, and the weights of both."""
    directories, states = [], []
    for name, shift in (("repeating", 0), ("contrary", 7)):
        model = make_repeating_model(path / name, tied=False)
        state = {name: tensor.bfloat16() for name, tensor in load_file(model / FILE).items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"].roll(shift, 0)
        save_file(state, model / FILE, metadata={"format": "pt"})
        directories.append(model)
        states.append(state)
    return *directories, *states  # type: ignore[return-value]


async def accepted_share(rollouts: tidegate.Rollouts) -> float:
    """Play held-out episodes; return the share of all engines' draft tokens that was accepted."""

    def counts() -> tuple[int, int]:
        engines = rollouts.statistics().engines
        return sum(e.accepted_draft_tokens for e in engines), sum(e.draft_tokens for e in engines)

    accepted, drafted = counts()
    await rollouts.evaluate(range(8), episode=solve)
    now_accepted, now_drafted = counts()
    return (now_accepted - accepted) / (now_drafted - drafted)


@pytest.mark.usefixtures("drafts_pay")
@pytest.mark.parametrize("weight_deltas", [False, True, "elements"])
async def test_a_published_draft_is_accepted_also_on_a_late_engine_and_after_publishes_without(
    tmp_path: Path, weight_deltas: Any
) -> None:
    model, draft, state, contrary = two_models(tmp_path)
    run = tmp_path / "run"
    async with tidegate.serve(
        model=model,
        **SMALL,
        run_directory=run,
        speculative_method=f"draft:{draft}",
        weight_deltas=weight_deltas,
    ) as rollouts:
        assert await accepted_share(rollouts) < 0.2
        async for batch in rollouts.batches(range(6), episode=solve):
            if batch.number < 3:  # the second brings what has changed
                state["model.layers.1.mlp.down_proj.weight"] *= 0.5
                await rollouts.publish(state, draft=state, batches=[batch])
            else:
                await rollouts.publish(state, batches=[batch])
            assert await accepted_share(rollouts) == 1.0
        await rollouts.scale(engines=2)
        async with asyncio.timeout(60):
            while not rollouts.statistics().engines[1].draft_tokens:
                assert await accepted_share(rollouts) == 1.0
        await rollouts.publish({}, draft=contrary, batches=[], partial=True)
        assert await accepted_share(rollouts) < 0.2
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert not any(
        "draft." in name for file in run.rglob("*.safetensors") for name in load_file(file)
    )


@pytest.mark.usefixtures("drafts_pay")
async def test_a_draft_sleeps_with_the_policy_and_comes_back_at_a_wake_or_a_publish(
    tmp_path: Path,
) -> None:
    model, _, state, contrary = two_models(tmp_path)
    async with tidegate.serve(
        model=model, **SMALL, speculative_method=f"draft:{model}", num_kv_blocks=500
    ) as rollouts:
        await rollouts.sleep(2)
        await rollouts.wake()  # both models come from their directories, and the draft also here:
        assert await accepted_share(rollouts) == 1.0
        await rollouts.sleep(2)
        await rollouts.publish(state, batches=[])
        await rollouts.wake()
        assert await accepted_share(rollouts) == 1.0
        for _ in range(2):  # both buffers
            await rollouts.publish(state, batches=[])
            assert await accepted_share(rollouts) == 1.0
        await rollouts.publish(contrary, batches=[])
        assert await accepted_share(rollouts) < 0.2
        await rollouts.publish(contrary, draft=contrary, batches=[])
        [engine] = rollouts.statistics().engines
        kv_bytes = 2 * 500 * engine.block_tokens * 2 * 2 * 2 * 16 * 4  # of two models
        assert await rollouts.sleep(1, tags=["kv_cache"]) > 0.9 * kv_bytes
        await rollouts.wake()
        assert await accepted_share(rollouts) == 1.0
        for level in (1, 2):
            await rollouts.sleep(level)
            await rollouts.wake()
            assert await accepted_share(rollouts) == 1.0
            await rollouts.sleep(level)
            await rollouts.publish(contrary, batches=[])
            await rollouts.wake()
            assert await accepted_share(rollouts) == 1.0
        await rollouts.rollback(contrary, first_bad=1)
        assert await accepted_share(rollouts) == 1.0


@pytest.mark.usefixtures("drafts_pay")
async def test_draft_weights_that_do_not_fit_are_refused_by_name_and_the_live_ones_stay(
    tmp_path: Path,
) -> None:
    model, directory, state, _ = two_models(tmp_path)
    draft = state
    wrong: dict[str, State] = {
        r"the draft model, MistralForCausalLM of 2 layers, has no tensor 'draft\.x'": {
            "x": draft["lm_head.weight"]
        },
        r"missing, first draft\.model\.embed_tokens": {"lm_head.weight": draft["lm_head.weight"]},
        r"draft\.lm_head\.weight has shape \[5, 64\], expected \[96, 64\]": {
            **draft,
            "lm_head.weight": draft["lm_head.weight"][:5],
        },
        r"draft\.lm_head\.weight is torch\.int32": {
            **draft,
            "lm_head.weight": draft["lm_head.weight"].int(),
        },
        r"draft\.lm_head\.weight contains NaN": {
            **draft,
            "lm_head.weight": draft["lm_head.weight"] * math.nan,
        },
    }
    async with tidegate.serve(
        model=model, **SMALL, speculative_method=f"draft:{directory}"
    ) as rollouts:
        await rollouts.publish(state, draft=draft, batches=[])
        for why, tensors in wrong.items():
            with pytest.raises(WeightsRefused, match=why):
                await rollouts.publish(state, draft=tensors, batches=[])
        assert await accepted_share(rollouts) == 1.0
        assert rollouts.version == 1


async def test_a_draft_for_engines_without_a_draft_model_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    model = make_repeating_model(tmp_path / "model")
    state = load_file(model / FILE)
    async with tidegate.serve(model=model, **SMALL, speculative_method="lookup") as rollouts:
        with pytest.raises(
            ConfigError,
            match=r"no engine has a draft model .*engine-0 \(tidegate\).*'draft:DIRECTORY'",
        ):
            await rollouts.publish(state, draft=state, batches=[])
        assert rollouts.version == 0


@pytest.mark.usefixtures("drafts_pay")
async def test_a_remote_trainer_publishes_a_draft_and_not_in_shards(tmp_path: Path) -> None:
    model, directory, state, _ = two_models(tmp_path)
    address = f"ipc://{tmp_path}/trainer"
    async with tidegate.serve(model=model, **SMALL, speculative_method=f"draft:{directory}") as run:
        listen = asyncio.create_task(tidegate.listen(run, address, tasks=range(2), episode=solve))
        async with tidegate.connect(address) as trainer:
            async for batch in trainer.batches():
                await trainer.publish(state, draft=state, batches=[batch])
                with pytest.raises(ConfigError, match=r"sharded=True\) sends no draft"):
                    await trainer.publish(state, draft=state, batches=[], sharded=True)
        await listen
        assert (run.version, await accepted_share(run)) == (1, 1.0)
