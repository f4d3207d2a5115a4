"""A small real run whose dashboard is queried during the run; recorded once for several tests."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.observability.dashboard.dashboard import URL_FILE

BATCHES = 4
LONG_NUMBER = "/api/rollouts/" + "9" * 5000
"""More digits than Python converts to an int."""

HOSTILE_TASK = '<script>document.title = "taken"</script><img src=x onerror="alert(1)">'


@dataclass
class Watched:
    """Responses of the dashboard during the run, and the run's directory."""

    directory: Path
    answers: dict[str, Any] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    headers: dict[str, Mapping[str, str]] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    reported: list[Mapping[str, float]] = field(default_factory=list)
    url_file: str = ""
    url: str = ""
    trained: int = 0


async def two_turns(episode: tidegate.Episode, task: str) -> float:
    episode.append([10, 11, 12])
    await episode.generate(max_tokens=8)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


def watched_run(directory: Path) -> Watched:
    """Train for a few batches, and query everything before the last one."""
    model = make_model_directory(directory / "model")
    seen = Watched(directory / "run")
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        max_running_turns=8,
        run_directory=seen.directory,
        dashboard_address="127.0.0.1:0",
        on_batch=seen.reported.append,
    ) as rollouts:
        assert rollouts.dashboard_url is not None
        seen.url = rollouts.dashboard_url
        tasks = [HOSTILE_TASK] * (2 * BATCHES)
        for number, _ in enumerate(rollouts.batches(tasks, episode=two_turns), start=1):
            rollouts.publish(load_file(model / "model.safetensors"))
            rollouts.report_off_policyness(effective_sample_size=0.75, mismatch_kl=0.01)
            if number == BATCHES - 1:
                while rollouts.statistics().running_groups:  # a frame's parts are read in turn
                    time.sleep(0.01)
                ask(seen)
                seen.trained = rollouts.statistics().trained_rollouts
    return seen


def ask(seen: Watched) -> None:
    seen.url_file = (seen.directory / URL_FILE).read_text()
    with httpx.Client(base_url=seen.url, timeout=30) as http:
        for path in (
            "/",
            "/page.js",
            "/api/state",
            "/api/rollouts",
            "/api/rollouts?state=trained",
            "/api/rollouts?group=0",
            "/api/rollouts?state=trained&mixed=1",
            "/api/rollouts?sort=rollout_id&descending=1",
            "/api/rollouts?task=ONERROR&reward_min=0.5&reward_max=1",
            "/api/rollouts?text=no%20such%20text",
            "/api/rollouts?sort=colour",
            "/api/rollouts?state=none",
            "/api/rollouts?group=x",
            "/api/rollouts/0",
            "/api/rollouts/0?start=4",
            "/api/rollouts/0?start=-1",
            "/api/rollouts/999999",
            "/api/rollouts/-1",
            "/api/rollouts/x",
            LONG_NUMBER,
            "/api/stories/rollout:0",
            "/api/stories/group:0",
            "/api/stories/batch:0",
            "/api/stories/batch:999",
            "/api/stories/step:0",
            "/metrics",
            "/page/../run.json",
        ):
            answer = http.get(path)
            seen.statuses[path], seen.headers[path] = answer.status_code, answer.headers
            is_json = answer.headers.get("content-type") == "application/json"
            seen.answers[path] = answer.json() if is_json else answer.text
        stranger = http.get("/api/state", headers={"Host": "evil.example"})
        seen.statuses["as a stranger"] = stranger.status_code
        with http.stream("GET", "/api/updates") as updates:
            for line in updates.iter_lines():
                if line.startswith("data: "):
                    seen.update = json.loads(line.removeprefix("data: "))
                    return
