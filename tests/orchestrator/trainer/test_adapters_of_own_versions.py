"""Adapters with weight versions of their own, published one by one to real engines."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tidegate
from tests.orchestrator.trainer.runs import audited
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter
from tidegate.errors import ConfigError, TurnRefused, WeightsRefused
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.recording import RunRecorder
from tidegate.observability.records.weight_archive import adapter_weights_path

pytestmark = pytest.mark.wire

PROMPT = [7, 8, 9]
Sampled = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Adapter, token ids, and the version of each token."""


class Sampler:
    """Episode that samples greedily with the adapter (and version) that its task names."""

    def __init__(self, max_tokens: int = 12, min_tokens: int = 0) -> None:
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.sampled: list[Sampled] = []
        self.refusals: list[str] = []

    async def __call__(self, episode: tidegate.Episode, task: tuple[str, int | None]) -> float:
        name, version = task
        episode.append(PROMPT)
        try:
            turn = await episode.generate(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                temperature=0.0,
                adapter=name,
                adapter_version=version,
            )
        except TurnRefused as error:
            self.refusals.append(str(error))
            return 0.0
        versions = [span.version for span in turn.spans for _ in range(span.start, span.end)]
        self.sampled.append((name, tuple(turn.token_ids), tuple(versions)))
        return 1.0


async def test_adapters_are_published_pinned_and_unloaded_one_by_one(model: Path) -> None:
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    async with tidegate.serve(model=model, engines=2, group_size=2) as rollouts:
        solver, critic = rollouts.adapter("solver"), rollouts.adapter("critic")
        assert await solver.publish(first, config=CONFIG) == 1
        assert await critic.publish(second, config=CONFIG) == 1
        sampler = Sampler()
        names = [("solver", None), ("critic", None), ("", None)]
        await rollouts.evaluate(names, episode=sampler)
        before = {name: ids for name, ids, _ in sampler.sampled}
        assert len(set(before.values())) == 3
        assert {v for _, _, versions in sampler.sampled for v in versions} == {0, 1}

        assert await solver.pin() == 1
        assert await solver.publish(second, config=CONFIG) == 2
        sampler = Sampler()
        await rollouts.evaluate([*names, ("solver", 1)], episode=sampler)
        by_version = {(name, versions[0]): ids for name, ids, versions in sampler.sampled}
        assert by_version == {
            ("solver", 2): before["critic"],  # the same tensors under another name
            ("critic", 1): before["critic"],
            ("", 0): before[""],
            ("solver", 1): before["solver"],
        }
        assert rollouts.version == 0

        odd = {name.replace("layers.0", "layers.7"): tensor for name, tensor in first.items()}
        with pytest.raises(WeightsRefused, match="is no matrix of this model"):
            await solver.publish(odd, config=CONFIG)
        assert await solver.publish(first, config=CONFIG) == 4  # no number is used twice
        state = load_file(model / "model.safetensors")
        with pytest.raises(ConfigError, match="can't be published under adapters"):
            await rollouts.publish(state)

        await solver.unload()
        sampler = Sampler()
        await rollouts.evaluate([("solver", None), ("critic", None)], episode=sampler)
        assert [name for name, _, _ in sampler.sampled] == ["critic"]
        assert "not loaded (any more)" in sampler.refusals[0]
        assert await solver.publish(first, config=CONFIG) == 5


async def test_a_publish_of_one_adapter_splits_no_other_turn_and_recomputes_nothing_else(
    model: Path,
) -> None:
    """Each adapter's own turns change their version in mid-turn; the others' spans stay whole."""
    tensors = random_adapter(model, 1)
    async with tidegate.serve(
        model=model, engines=1, group_size=2, pause_mode="keep", step_time_min_s=0.01
    ) as rollouts:
        solver, critic = rollouts.adapter("solver"), rollouts.adapter("critic")
        for each in (solver, critic):
            await each.publish(tensors, config=CONFIG)
        sampler = Sampler(max_tokens=300)
        tasks = [("solver", None), ("critic", None), ("", None), ("solver", 1)]
        await solver.pin(1)
        running = asyncio.ensure_future(rollouts.evaluate(tasks, episode=sampler))
        for _ in range(3):
            await solver.publish(tensors, config=CONFIG)
        await running
    versions = {(name, versions[-1]): set(versions) for name, _, versions in sampler.sampled}
    assert versions.pop(("critic", 1)) == {1}
    assert versions.pop(("", 0)) == {0}
    assert versions.pop(("solver", 1)) == {1}  # the pinned turn
    [(_, following)] = versions.items()
    assert following <= {1, 2, 3, 4}
    assert len(following) >= 2


async def test_no_step_leaves_out_turns_of_other_adapters_while_one_is_published(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a publish costs another's decode stream no step, whatever it costs the adapter's own."""
    rows: list[int] = []
    monkeypatch.setattr(RunRecorder, "engine_step", lambda _, step: rows.append(step.rows))
    tensors = random_adapter(model, 1)
    tokens = 200

    async def sample(episode: tidegate.Episode, name: str) -> float:
        episode.append(PROMPT)
        turn = await episode.generate(max_tokens=tokens, adapter=name, stop_token_ids=[])
        assert len(turn.token_ids) == tokens
        return 0.0

    async with tidegate.serve(
        model=model,
        engines=1,
        group_size=2,
        pause_mode="keep",
        kv_policy="recompute",
        step_time_min_s=0.002,
        run_directory=tmp_path / "run",
    ) as rollouts:
        solver, critic = rollouts.adapter("solver"), rollouts.adapter("critic")
        for each in (solver, critic):
            await each.publish(tensors, config=CONFIG)
        tasks = ["solver", *2 * [""], *3 * ["critic"]]
        running = asyncio.ensure_future(rollouts.evaluate(tasks, episode=sample))
        published = 0
        while not running.done():
            await solver.publish(tensors, config=CONFIG)
            published += 1
        await running
    assert published > 2
    # A step reports the turns of each adapter by themselves, so each number of rows names one.
    # Turns start and end one after another; in between, no step leaves out the base or the critic.
    steps = "".join(map(str, rows))
    first = re.search("23|32", steps)
    assert first is not None
    steps = steps[first.start() : steps.rindex(first[0]) + 2]
    assert re.fullmatch(f"({first[0]})+", steps.replace("1", "")), steps
    assert "11" not in steps  # nor is one made for the solver's turn alone
    assert steps.count("1") > tokens / 2


async def test_a_hundred_adapters_are_served_in_turn_by_engines_that_hold_few(model: Path) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2, adapters_max=3) as rollouts:
        for number in range(100):
            tensors = {n: t for n, t in random_adapter(model, number % 5).items() if "q_proj" in n}
            await rollouts.adapter(f"a{number}").publish(tensors, config=CONFIG)
        sampler = Sampler(max_tokens=4)
        tasks = [(f"a{(7 * number) % 100}", None) for number in range(100)]
        await rollouts.evaluate(tasks, episode=sampler)
        assert not sampler.refusals
        assert sorted(name for name, _, _ in sampler.sampled) == sorted(n for n, _ in tasks)
        by_seed: dict[int, set[tuple[int, ...]]] = {}
        for name, ids, _ in sampler.sampled:
            by_seed.setdefault(int(name[1:]) % 5, set()).add(ids)
        assert all(len(answers) == 1 for answers in by_seed.values())


async def test_a_restarted_engine_gets_the_adapters_that_its_turns_need(model: Path) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        await rollouts.adapter("solver").publish(random_adapter(model, 1), config=CONFIG)
        before, after = Sampler(), Sampler()
        await rollouts.evaluate([("solver", None)], episode=before)
        engines = rollouts._running._engines
        assert engines is not None
        engines.kill("engine-0")
        await rollouts.evaluate([("solver", None)], episode=after)
        assert after.sampled == before.sampled


async def test_tokens_of_live_and_pinned_versions_are_audited_and_wrong_tags_are_found(
    model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    async with tidegate.serve(
        model=model,
        engines=2,
        group_size=2,
        pause_mode="keep",
        kv_policy="keep",
        step_time_min_s=0.01,  # so that turns outlast the publishes
        deterministic=True,
        run_directory=run,
    ) as rollouts:
        await rollouts.publish(load_file(model / "model.safetensors"))
        handles = [rollouts.adapter(name) for name in ("solver", "../a b: \u00e9." + 90 * "n")]
        for seed, handle in enumerate(handles):
            await handle.publish(random_adapter(model, seed), config=CONFIG)
        await handles[0].pin(1)
        sampler = Sampler(max_tokens=150, min_tokens=150)
        tasks = [(handle.name, version) for handle in handles for version in (None, None)]
        running = asyncio.ensure_future(
            rollouts.evaluate([*tasks, ("solver", 1), ("", None)], episode=sampler)
        )
        for seed in range(2, 6):
            await handles[seed % 2].publish(random_adapter(model, seed), config=CONFIG)
        await running
    for exact in (False, True):
        report = audited(run, exact=exact)
        assert report.tokens_agreeing == report.tokens
        assert report.spans_mixed > 0
        assert report.version_power.unnoticed_share < 0.5

    archive = adapter_weights_path(run, "solver", 1)
    shutil.rmtree(archive)
    assert any("with adapter 'solver', which are not" in str(p) for p in audit_run(run).problems)
    shutil.copytree(adapter_weights_path(run, "solver", 2), archive)
    (archive / "parts.json").write_text(
        (archive / "parts.json").read_text().replace('"version":2', '"version":1')
    )
    assert not audit_run(run).agrees
