"""A short real run, recorded once per session, for tests of reports, comparisons and plans.

Its trainer computes nothing: the tests only read the recorder's files.
"""

from pathlib import Path
from typing import Any

import tidegate
from tests.models import make_model_directory
from tidegate.observability.records.trajectories import RecordedTurn

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
