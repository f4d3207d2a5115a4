"""Is every token of a run over the real SGLang what its tags say? Where there is such a server.

By hand: SGLang has no build for CPUs. Start one with a model that nobody minds being retrained, and

    TIDEGATE_SGLANG_URL=http://127.0.0.1:30000 TIDEGATE_SGLANG_MODEL=DIR make test-sglang

on a machine where this process and the server see one file system.
"""

import os
from pathlib import Path

import pytest

import tidegate
from tests.engine.adapter_runs import train

URL = os.environ.get("TIDEGATE_SGLANG_URL", "")
MODEL = os.environ.get("TIDEGATE_SGLANG_MODEL", "")

pytestmark = [
    pytest.mark.skipif(
        not (URL and MODEL), reason="needs a server: TIDEGATE_SGLANG_URL and TIDEGATE_SGLANG_MODEL"
    ),
    pytest.mark.timeout(900),  # 20 to 60 ms a token on a CPU
]


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    episode.append(task)
    first = await episode.generate(max_tokens=40)
    episode.append([3, 4, 5])
    await episode.generate(max_tokens=20)
    return float(len(first.token_ids))


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
async def test_tags_are_right_over_sglang(kv_policy: str, tmp_path: Path) -> None:
    report = await train(
        Path(MODEL),
        tmp_path / "run",
        episode=solve,
        engine_urls=[f"sglang+{URL}"],
        kv_policy=kv_policy,
    )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 2
