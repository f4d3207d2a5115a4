"""Records for tests: of a short real run whose trainer computes nothing, and made-up ones."""

from pathlib import Path
from typing import Any

import tidegate
from tests.models import make_model_directory
from tidegate.observability.records.recording import RunRecorder
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.core.provenance import TurnPrefill
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.transport.messages import KvSpan, SamplingParams

REPORT_KEYS = {
    "reward_before",
    "reward_after",
    "versions",
    "mixed_version_share",
    "max_staleness",
    "staleness_bound",
    "wall_s",
    "tokens_trained",
    "tokens_discarded",
    "trainer_idle_share",
    "engine_idle_share",
}
"""Figures that each run's report has."""


def recorded_turn(start: int, length: int, **fields: Any) -> RecordedTurn:
    """Return a turn as recorded, sampled without options and scores."""
    known: dict[str, Any] = {
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "prefills": (),
        "attachments": {},
    }
    absent = ("options", "reward", "media")
    return RecordedTurn(
        start=start,
        length=length,
        **(dict.fromkeys(absent) | known | fields),  # type: ignore[arg-type]
    )


def recorded_rollout(rollout_id: int, *turns: RecordedTurn, **fields: Any) -> RecordedRollout:
    """Return a rollout that was trained at v6, as recorded."""
    known: dict[str, Any] = {
        "group_id": 3,
        "index": rollout_id % 2,
        "task": '"1+1"',
        "reward": 1.0,
        "advantage": 0.5,
        "state": "trained",
        "discard_reason": None,
        "consumed_version": 6,
        "staleness": 1,
        "token_ids": [],
        "logprobs": [],
        "branch_of": None,
        "fork_reason": "",
    }
    return RecordedRollout(rollout_id=rollout_id, turns=turns, **(known | fields))


def a_rollout(rollout_id: int = 7) -> Rollout:
    """Two turns; the second was kept after its first token and continued with v4 and v3's KV."""
    rollout = Rollout(rollout_id, group_id=3, index=1)
    rollout.extend([5, 6])
    first = Turn(rollout, SamplingParams(max_tokens=4, seed=2**63))
    rollout.turns.append(first)
    first.prefills = (TurnPrefill(0, (KvSpan(3, 0, 2),)),)
    first.append(10, -0.5, 3, "engine-0")
    first.finish_reason = "stop"
    rollout.extend([7])
    second = Turn(rollout, SamplingParams(max_tokens=4, temperature=0.5, top_k=9, top_p=0.75))
    rollout.turns.append(second)
    second.prefills = (TurnPrefill(0, (KvSpan(3, 0, 4),)),)
    second.append(11, -1.5, 3, "engine-1")
    second.append(12, -2.5, 4, "engine-1")
    rollout.reward = 1.0
    rollout.state = RolloutState.TRAINED
    return rollout


def some_statistics() -> RunStatistics:
    return RunStatistics(
        wall_s=2.5,
        trainer_version=4,
        live_version=4,
        admissible_groups=0,
        running_groups=0,
        buffered_groups=0,
        training_groups=0,
        batches=4,
        trained_rollouts=1,
        mixed_version_rollouts=1,
        discarded_rollouts={"episode_error": 2},
        max_staleness_seen=2,
        staleness_bound=2,
        mean_staleness=2.0,
        staleness_histogram={2: 1},
        trainer_idle_share=0.25,
        engine_idle_share=0.125,
        tokens_per_s=100.0,
        ledger=LedgerSnapshot(generated=5, trained=3, discarded={"episode_error": 2}),
        evaluation_ledger=LedgerSnapshot(),
    )


def recorder(directory: Path, settings: Any = None, **options: Any) -> RunRecorder:
    """Return a recorder, of a run of a model without weights unless ``options`` name another."""
    if "model" not in options:
        options["model"] = directory.parent / "model"
        options["model"].mkdir(parents=True, exist_ok=True)
        (options["model"] / "config.json").write_text("{}")
    return RunRecorder(directory, settings=settings or {}, **options)


def keep(recorder: RunRecorder, *rollouts: Rollout, version: int | None = None) -> None:
    """Record rollouts, as consumed at a version."""
    for each in rollouts:
        recorder.rollout(each, task=None, advantage=None, consumed_version=version)


async def solve(episode: tidegate.Episode, task: str) -> float:
    """Generate 8 tokens; the reward is the share of letters among them."""
    episode.append(task)
    turn = await episode.generate(max_tokens=8)
    return sum(each.isalpha() for each in turn.text) / 8


def record_run(directory: Path, *, batches: int = 4, max_staleness: int = 1) -> Path:
    """Run a tiny model for a few batches with unchanged weights; return the run's directory."""
    from safetensors.torch import load_file

    model = directory.parent / "model"
    if not model.exists():
        make_model_directory(model)
    tasks = [f"{number}+1=" for number in range(2 * batches)]
    with tidegate.serve_sync(
        model=model,
        engines=1,
        max_running_turns=4,
        max_staleness=max_staleness,
        group_size=2,
        groups_per_batch=2,
        run_directory=directory,
    ) as rollouts:
        weights = load_file(model / "model.safetensors")
        for _ in rollouts.batches(tasks, episode=solve):
            rollouts.publish(weights)
    return directory
