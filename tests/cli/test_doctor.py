"""`tidegate doctor` against HTTP doubles of engines with one fault each."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.command_line import tidegate
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.models import make_model_directory
from tests.served_app import served
from tidegate.cli.engine_doctor.findings import NEEDED, Verdict, findings
from tidegate.cli.engine_doctor.measurements import (
    Identity,
    LogprobMismatch,
    LogprobMode,
    Measurements,
    PrefixCache,
    Repeats,
    TokenizerCheck,
)
from tidegate.cli.engine_doctor.measuring import drawn_prompt, examined, measure
from tidegate.engine.execution.block_cache import cache_argument
from tidegate.errors import ConfigError, EngineLost

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("models") / "served")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("models") / "other", seed=1)


@contextmanager
def sglang(model: Path, **how: Any) -> Iterator[str]:
    double = SglangDouble(model, **how)
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        yield url


def verdicts(url: str, model: Path | None) -> dict[str, Verdict]:
    """Return the worst verdict of each check."""
    order = list(Verdict)
    worst: dict[str, Verdict] = {}
    for finding in findings(measure(examined(url), model)):
        before = worst.get(finding.check, Verdict.OK)
        worst[finding.check] = max(before, finding.verdict, key=order.index)
    return worst


def test_an_engine_that_requires_a_key_gets_the_environments_key(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sglang(model, api_key="sesame") as url:
        with pytest.raises(ConfigError, match=r"requires a key.*TIDEGATE_ENGINE_KEY"):
            examined(url)
        monkeypatch.setenv("TIDEGATE_ENGINE_KEY", "sesame")
        assert examined(url.removeprefix("http://")).identity.kind == "sglang"


def test_a_correct_engine_is_fit_with_status_0(model: Path) -> None:
    with sglang(model) as url:
        assert examined(f"sglang+{url}").identity.kind == "sglang"  # as in engine_urls
        ended = tidegate("doctor", url, "--model", model, "--json")
    assert ended.status == 0
    report = json.loads(ended.out)
    assert report["fit"] is True
    assert {one["check"]: one["verdict"] for one in report["findings"]} == {
        "capabilities": "ok",
        "log-probs": "ok",
        "truncation": "warn",  # SGLang reports log-probs from before top_k
        "mismatch": "ok",
        "tokenizer": "ok",
        "determinism": "ok",
        "prefix cache": "ok",
        "cache salt": "ok",
    }
    assert report["measurements"]["logprobs"]["gap_ratio"] == pytest.approx(2, abs=0.01)
    # Prompts drawn from 20 ids sometimes share their first one or two tokens.
    assert report["measurements"]["cache"]["first_tokens"] < 6


def test_the_doctors_prompts_do_not_share_a_prefix(model: Path) -> None:
    with sglang(model) as url:
        engine = examined(url)
        prompts = {drawn_prompt(engine, None, 24)[:8] for _ in range(500)}
    assert len(prompts) == 500


def test_raw_log_probs_fail_even_without_the_model(model: Path) -> None:
    with sglang(model, is_raw=True) as url:
        ended = tidegate("doctor", url)
    assert ended.status == 1
    assert "fail  log-probs: raw" in ended.out
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in ended.out


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999", "ftp://host", "http://"])
def test_an_invalid_engine_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT"):
        examined(url)


def test_weights_other_than_the_directorys_fail_the_mismatch_check(
    model: Path, other_model: Path
) -> None:
    with sglang(model) as url:
        assert verdicts(url, other_model)["mismatch"] == Verdict.FAIL


def test_a_different_tokenizer_fails_the_tokenizer_check(model: Path, tmp_path: Path) -> None:
    damaged = make_model_directory(tmp_path / "damaged")
    tokenizer = json.loads((damaged / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    (damaged / "tokenizer.json").write_text(json.dumps(tokenizer))
    with sglang(model) as url:
        found = verdicts(url, damaged)
    assert found["tokenizer"] == Verdict.FAIL
    assert found["mismatch"] == Verdict.OK  # token ids in and out: the tokenizer does not matter


def test_kv_of_other_weights_in_the_prefix_cache_is_detected(
    model: Path, other_model: Path
) -> None:
    """As if the weights had been updated without a flush between the two requests."""
    double = SglangDouble(model)
    stale = SglangDouble(other_model)
    find_prefix = double.sampler.find_prefix

    def find_stale(request: Any) -> None:
        find_prefix(request)
        if request.cache is not None:
            tokens = torch.tensor([request.tokens[: request.cached]])
            request.cache = transformers.DynamicCache()
            with torch.no_grad():
                stale.model(tokens, **cache_argument(stale.model, request.cache))

    double.sampler.find_prefix = find_stale  # type: ignore[method-assign]
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        assert verdicts(url, None)["prefix cache"] == Verdict.FAIL


def test_an_unreachable_engine_gives_one_line_and_status_2() -> None:
    ended = tidegate("doctor", "http://127.0.0.1:9")
    [line] = ended.err.splitlines()
    assert ended.status == 2
    assert "http://127.0.0.1:9 did not respond" in line


def test_a_server_that_is_not_an_engine_is_refused(model: Path) -> None:
    from starlette.applications import Starlette

    with (
        served(lambda: (Starlette(), None)) as url,
        pytest.raises(ConfigError, match="is neither an SGLang"),
    ):
        examined(url)


def test_an_engine_that_dies_during_the_examination_is_an_error_not_a_finding(
    model: Path,
) -> None:
    double = SglangDouble(model)
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        engine = examined(url)
        double.is_dead = True
        with pytest.raises(EngineLost, match="status 500"):
            measure(engine)


def test_each_measurement_gives_the_right_finding_and_remedy() -> None:
    def worst(**changes: Any) -> list[tuple[str, Verdict, str]]:
        found = findings(dataclasses.replace(SOUND, **changes))
        return [(f.check, f.verdict, f.remedy) for f in found if f.verdict != Verdict.OK]

    raw = LogprobMode(gap_ratio=1.0, truncated_mass=None)
    odd = LogprobMode(gap_ratio=1.5, truncated_mass=None)
    logits = LogprobMode(gap_ratio=2.0, truncated_mass=40.0)
    unsteady = dataclasses.replace(SOUND.repeats, batch_same_tokens=False)
    unseeded = dataclasses.replace(SOUND.repeats, seed_same_tokens=False)
    blind = dataclasses.replace(SOUND.cache, again_tokens=None, salted_tokens=None)
    unsalted = dataclasses.replace(SOUND.cache, salted_tokens=256)
    rounded = LogprobMismatch(tokens=80, mean=0.01, largest=0.1)
    overlapping = dataclasses.replace(SOUND.identity, kind="sglang")
    sglang_routes = {route for need in NEEDED["sglang"] for route in need.any_of}
    overlapping = dataclasses.replace(overlapping, paths=frozenset(sglang_routes))
    whole = dataclasses.replace(overlapping, settings={"disable_overlap_schedule": True})
    assert worst() == worst(identity=whole) == []
    for changes, check, verdict, remedy in (
        ({"logprobs": raw}, "log-probs", Verdict.FAIL, "processed_logprobs"),
        ({"logprobs": odd}, "log-probs", Verdict.FAIL, "penalties"),
        ({"logprobs": logits}, "log-probs", Verdict.FAIL, "processed_logprobs"),
        ({"repeats": unsteady}, "determinism", Verdict.WARN, "VLLM_BATCH_INVARIANT"),
        ({"repeats": unseeded}, "seeds", Verdict.WARN, "reproduce rollouts"),
        ({"cache": blind}, "prefix cache", Verdict.NOTE, "cache_salt"),
        ({"cache": unsalted}, "cache salt", Verdict.WARN, "clear_cache=true"),
        ({"mismatch": rounded}, "mismatch", Verdict.WARN, "head_dtype"),
        ({"weight_spans": False}, "weight spans", Verdict.WARN, "--enable-scale-out"),
        ({"identity": overlapping}, "kept KV", Verdict.WARN, "--disable-overlap-schedule"),
    ):
        [(reported_check, reported_verdict, reported_remedy)] = worst(**changes)
        assert (reported_check, reported_verdict) == (check, verdict)
        assert remedy in reported_remedy


def test_a_vllm_without_development_routes_gets_the_start_command_as_remedy() -> None:
    bare = dataclasses.replace(SOUND.identity, paths=frozenset({"/v1/completions"}))
    found = [one for one in findings(dataclasses.replace(SOUND, identity=bare)) if one.remedy]
    assert {one.verdict for one in found if "VLLM_SERVER_DEV_MODE=1" in one.remedy} >= {
        Verdict.FAIL
    }
    assert any("--enable-scale-out" in one.remedy for one in found)


SOUND = Measurements(
    identity=Identity(
        kind="vllm",
        version="0.32.0",
        model="tiny",
        context_tokens_max=512,
        paths=frozenset(
            {"/inference/v1/generate", "/pause", "/collective_rpc", "/weight_info", "/sleep"}
        ),
        settings={},
    ),
    logprobs=LogprobMode(gap_ratio=2.0, truncated_mass=1.0),
    repeats=Repeats(
        alone_same_tokens=True,
        alone_difference=0.0,
        batch_same_tokens=True,
        batch_difference=0.0,
        seed_same_tokens=True,
    ),
    cache=PrefixCache(first_tokens=0, again_tokens=256, salted_tokens=0, difference=0.0),
    weight_spans=True,
    mismatch=LogprobMismatch(tokens=80, mean=8e-7, largest=3e-6),
    tokenizer=TokenizerCheck(texts=7, different=()),
    update=None,
)
"""Measurements of vLLM 0.32.0 on a CPU."""
