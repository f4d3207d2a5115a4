"""Tests that version tags are right in runs over other engines: whole runs, audited.

The engine is a double of vLLM that computes with real weights and keeps real KV, so a tag that is
wrong by one token, one version or one cached prefix shows in a log-prob. Against the real server:
`make test-vllm`.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tidegate
from tests.engine.external.adapter_runs import InTheMidst, solve, train
from tests.engine.external.vllm_double import VllmDouble
from tests.models import make_model_directory
from tidegate.engine.external.vllm_patches import EXTENSION
from tidegate.errors import ConfigError
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.settings.config import run_settings

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "untied", tied=False)


async def test_tags_are_right_where_kv_is_kept_and_where_a_server_is_killed(
    model: Path, tmp_path: Path
) -> None:
    with VllmDouble(model) as double, VllmDouble(model) as mortal:
        double.holds = mortal.holds = InTheMidst()
        report = await train(
            model,
            tmp_path / "run",
            after_two=mortal.kill,
            engine_urls=[f"vllm+{one.url}" for one in (double, mortal)],
            kv_policy="keep",
        )
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 2
    assert report.spans_mixed > 0


async def test_float32_weights_reach_a_float32_server_of_a_bfloat16_directory_as_published(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "model", tied=False, dtype="bfloat16")
    with VllmDouble(model) as double:  # computes in float32
        report = await train(model, tmp_path / "run", engine_urls=[f"vllm+{double.url}"])
    assert report.problems == ()
    assert report.agrees, report.lines()
    assert report.versions > 2


@pytest.mark.parametrize("fails", [False, True])
async def test_published_patches_change_elements_in_vllm_or_all_is_loaded_if_that_fails(
    fails: bool, model: Path, tmp_path: Path
) -> None:
    weights = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    run = tmp_path / "run"
    with VllmDouble(model, worker_extension_cls=EXTENSION) as double:
        double.fails_to_patch = fails
        async with tidegate.serve(
            model=model,
            run_directory=run,
            engine_urls=[f"vllm+{double.url}"],
            weight_deltas="elements",
            group_size=2,
            groups_per_batch=1,
            max_staleness=1,
        ) as rollouts:
            tasks = ([1, 2, 3, 10 + n] * 5 for n in range(5))
            async for _ in rollouts.batches(tasks, episode=solve):
                await rollouts.publish(weights)
                for tensor in weights.values():
                    tensor.view(-1)[::300] *= 1.5
        calls = [call for call in double.calls if call in ("patch", "reload")]
    assert calls == (["reload", "patch", *["reload"] * 4] if fails else ["reload", *["patch"] * 4])
    report = audit_run(run)
    assert report.problems == ()
    assert report.agrees
    assert report.versions > 2


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["http://127.0.0.1:8000"], "KIND+URL"),
        (["vllm+http://me:secret@127.0.0.1:8000"], "password or a query"),
        (["vllm+http://127.0.0.1:8000"] * 2, "names a server twice"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_anything_starts(
    urls: list[str], said: str, model: Path
) -> None:
    with pytest.raises(ConfigError, match=said.replace("+", r"\+")):
        run_settings(model=model, engine_urls=urls)


def test_a_pace_is_refused_for_servers_which_a_run_cannot_slow(model: Path) -> None:
    urls = ["vllm+http://127.0.0.1:8000"]
    with pytest.raises(
        ConfigError, match=r"step_time_min_s=0\.02 slows engines that the run starts"
    ):
        run_settings(model=model, engine_urls=urls, step_time_min_s=0.02)


def test_servers_alone_serve_a_run_unless_it_asks_for_engines_beside_them(model: Path) -> None:
    urls = ["vllm+http://127.0.0.1:8000"]
    assert run_settings(model=model, engine_urls=urls).fleet.engines_started == 1
    assert run_settings(model=model, engine_urls=urls, engines=2).fleet.engines_started == 3
