"""Tests that version tags are right in a run over SGLang: a whole run over a double, audited.

It computes with real weights and keeps real KV, so a tag that is wrong by one token, one version or
one cached prefix shows in a log-prob.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import tidegate
from tests.engine.external.adapter_runs import InTheMidst, train
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.models import make_model_directory
from tests.served_app import served
from tidegate.errors import ConfigError

pytestmark = pytest.mark.wire


async def solve(episode: tidegate.Episode, task: list[int]) -> float:
    """Without ``top_k``: SGLang's log-probs are those from before it, so it is refused."""
    episode.append(task)
    first = await episode.generate(max_tokens=40)
    episode.append([3, 4, 5])
    await episode.generate(max_tokens=20)
    return float(len(first.token_ids))


@pytest.mark.usefixtures("programs_are_executed")
async def test_tags_are_right_where_sglang_keeps_kv_over_updates(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "untied", tied=False)
    double = SglangDouble(model)
    double.holds = InTheMidst()
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        report = await train(
            model,
            tmp_path / "run",
            episode=solve,
            engine_urls=[f"sglang+{url}"],
            kv_policy="keep",
        )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 2
    assert report.spans_mixed > 0


@pytest.mark.usefixtures("programs_are_executed")
async def test_a_draft_for_a_server_is_refused_and_the_next_publish_is_taken(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "untied", tied=False)
    state, double = load_file(model / "model.safetensors"), SglangDouble(model)
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        async with tidegate.serve(model=model, engine_urls=[f"sglang+{url}"]) as rollouts:
            with pytest.raises(ConfigError, match=r"draft model .*\(sglang .* leave draft out"):
                await rollouts.publish(state, draft=state, batches=[])
            await rollouts.publish(state, batches=[])
            assert rollouts.version == 1
