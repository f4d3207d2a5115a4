"""What an audit can notice in runs of a pretrained model, trained by small steps."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from typer.testing import CliRunner

import tidegate
from tests.observability.sampled_runs import Row, edit_rollout, move_boundary
from tests.smollm2 import DIRECTORY, needs_smollm2
from tidegate.cli.command import app
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.recording import read_trajectories
from tidegate.transport.message import KvPolicy, PauseMode

pytestmark = [pytest.mark.wire, needs_smollm2]

LEARNING_RATE = 1e-6
TURN_TOKENS = 16
TURNS = 4

SWAPS: dict[str, dict[str, Any]] = {
    "bfloat16": {"pauses": ("keep", "keep"), "kv_policy": "keep"},
    "float32": {"pauses": ("keep", "abort"), "kv_policy": "recompute", "deterministic": True},
}
"""How each run's turns go on with new weights; bfloat16 is deterministic by default."""


def steps_of_training(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Return the last layers after one and after two small steps."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(DIRECTORY, dtype=torch.float32)
    model.requires_grad_(False)
    layers = model.model.layers[-8:].requires_grad_(True)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(100, 116)[None]).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        steps.append({name: p.detach().to(dtype, copy=True) for name, p in trained.items()})
    return steps


async def record(
    run: Path,
    dtype: Literal["float32", "bfloat16"],
    *,
    pauses: Sequence[PauseMode],
    kv_policy: KvPolicy,
    deterministic: bool | None = None,
) -> Path:
    """Record turns, during which both steps are published, each within a pause."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    steps = steps_of_training(getattr(torch, dtype))

    async def answer(episode: tidegate.Episode, task: str) -> float:
        question = [{"role": "user", "content": task}]
        episode.append(
            tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        )
        await episode.generate(max_tokens=TURN_TOKENS, min_tokens=TURN_TOKENS)
        return 0.0

    async with tidegate.serve(
        model=DIRECTORY,
        engines=1,
        dtype=dtype,
        deterministic=deterministic,
        max_staleness=len(steps),
        group_size=2,
        groups_per_batch=TURNS // 2,
        pause_mode="keep",
        kv_policy=kv_policy,
        num_kv_blocks=64,
        step_time_min_s=0.3,  # a turn takes 5 s
        run_directory=run,
    ) as rollouts:

        async def publish_during_turns() -> None:
            for number, (step, pause) in enumerate(zip(steps, pauses, strict=True), 1):
                while rollouts.statistics().engines[0].tokens < number * TURNS * TURN_TOKENS // 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                # While the turns wait, however long staging takes: they go on with the new weights.
                await rollouts.pause(pause)
                await rollouts.publish(step, batches=[], partial=True, wait="staged")
                await rollouts.resume()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_during_turns())
            async for _ in rollouts.batches(["3 + 12 = ?", "Who are you?"], episode=answer):
                pass
    return run


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def honest_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    return asyncio.run(record(run, request.param, **SWAPS[request.param]))


def test_each_tag_and_boundary_off_by_one_is_noticed_if_it_changes_a_log_prob(
    honest_run: Path,
) -> None:
    report = audit_run(honest_run)
    assert report.agrees, report.lines()
    assert report.tokens_agreeing == report.tokens == TURNS * TURN_TOKENS
    assert report.tokens_checked > 0
    for power in (report.version_power, report.boundary_power):
        assert power.tags_tried >= TURNS
        # Certain tokens have a log-prob of 0 under any version.
        assert power.tags_unnoticed == power.tags_same < power.tags_tried / 2
    assert report.verdict.endswith("would not be noticed: agrees")


def next_version(row: Row) -> None:
    turn = row["turns"][0]
    turn["spans"][0]["version"] += 1
    turn["prefills"][0]["spans"][0]["version"] += 1


@pytest.mark.parametrize("lie", [next_version, partial(move_boundary, shift=3)])
def test_a_wrong_tag_is_found(honest_run: Path, tmp_path: Path, lie: Callable[[Row], None]) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest_run, run, ignore=shutil.ignore_patterns("model.safetensors"))
    for weights in honest_run.glob("weights/*/model.safetensors"):
        (run / weights.relative_to(honest_run)).symlink_to(weights)
    for rollout in read_trajectories(run):
        edit_rollout(run, rollout.rollout_id, lie)
    assert audit_run(run, rollouts_max=1).verdict == "DISAGREES"


def test_an_audit_that_could_not_have_noticed_a_wrong_tag_does_not_agree(tmp_path: Path) -> None:
    swaps = {**SWAPS["bfloat16"], "deterministic": False}
    run = asyncio.run(record(tmp_path / "run", "bfloat16", **swaps))
    result = CliRunner().invoke(app, ["audit", str(run)])
    assert result.exit_code == 3, result.output
    assert "cannot tell: " in result.output.splitlines()[-1]
    assert "record with deterministic=True" in result.output.splitlines()[-1]
