"""`tidegate doctor --update`: weights and prefix cache over weight updates."""

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import tidegate
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.models import make_model_directory
from tests.served_app import served
from tidegate import vllm_server
from tidegate.cli.engine_doctor import examined as doctor_examined
from tidegate.cli.engine_doctor.findings import Finding, Verdict, findings
from tidegate.cli.engine_doctor.measurements import Measurements
from tidegate.cli.engine_doctor.measuring import examined, measure
from tidegate.cli.engine_doctor.reference import altered
from tidegate.errors import ConfigError, EngineLost

pytestmark = pytest.mark.wire

CHECKS = ("weight update", "cache over an update")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory in a folder of its own, to see what is left beside it."""
    return make_model_directory(tmp_path / "models" / "served")


@contextmanager
def sglang(model: Path) -> Iterator[tuple[SglangDouble, str]]:
    double = SglangDouble(model)
    with served(lambda: (make_app(double), double.sample_for_ever)) as url:
        yield double, url


def update_findings(measured: Measurements) -> dict[str, Finding]:
    return {found.check: found for found in findings(measured) if found.check in CHECKS}


def test_an_update_test_serves_new_weights_and_then_the_original_ones(model: Path) -> None:
    with sglang(model) as (double, url):
        ended = tidegate("doctor", url, "--model", model, "--update", "--json")
        assert ended.status == 0
        assert double.path == str(model)
        assert measure(examined(url), model).mismatch.mean < 1e-4  # type: ignore[union-attr]
    report = json.loads(ended.out)
    found = {one["check"]: one for one in report["findings"]}
    assert [found[check]["verdict"] for check in CHECKS] == ["ok", "ok"]
    # SGLang keeps its cache by default, and finds nothing there with another extra_key.
    assert "leaves KV of the old weights" in found["cache over an update"]["says"]
    assert "another salt does not find" in found["cache over an update"]["says"]
    update = report["measurements"]["update"]
    assert update["cleared"]["from_new"] < 1e-4 < update["cleared"]["from_old"]
    assert update["kept"]["from_new"] > 1e-3
    assert list(model.parent.iterdir()) == [model]


def test_tidegates_own_server_clears_its_cache_at_every_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_directory(tmp_path / "served", max_position_embeddings=512)
    about: dict[str, Any] = {"served_model_name": "tiny", "engines": 1}
    about["weight_directories"] = [tempfile.gettempdir()]
    with vllm_server(model=model, **about) as server:
        monkeypatch.setenv("TIDEGATE_ENGINE_KEY", server.control_token or "")
        found = update_findings(measure(examined(server.url), model, updates=True))
    assert {check: one.verdict for check, one in found.items()} == dict.fromkeys(CHECKS, Verdict.OK)
    assert "even if it does not ask" in found["cache over an update"].says


Update = Callable[[dict[str, Any]], Awaitable[Any]]


def keeping_the_cache(double: Any, update: Update) -> Update:
    return lambda body: update(body | {"flush_cache": False})


def but_one_matrix(double: Any, update: Update) -> Update:
    left = double.model.state_dict()["model.layers.0.mlp.down_proj.weight"]

    async def updated(body: dict[str, Any]) -> Any:
        before = left.clone()
        try:
            return await update(body)
        finally:
            left.copy_(before)

    return updated


def to_its_own(double: Any, update: Update) -> Update:
    return lambda body: update(body | {"model_path": double.path})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (keeping_the_cache, "matches neither weights"),
        (but_one_matrix, "matches neither weights"),
        (to_its_own, "computes with the old ones"),
    ],
)
def test_an_update_that_is_not_whole_is_detected(
    model: Path, changed: Callable[[Any, Update], Update], says: str
) -> None:
    with sglang(model) as (double, url):
        route = "/update_weights_from_disk"
        double.posts[route] = changed(double, double.posts[route])
        found = update_findings(measure(examined(url), model, updates=True))["weight update"]
    assert found.verdict == Verdict.FAIL
    assert says in found.says


def test_a_salt_that_finds_old_weights_kv_is_detected(model: Path) -> None:
    with sglang(model) as (double, url):
        generate = double.posts["/generate"]

        async def without_salt(body: dict[str, Any]) -> Any:
            return await generate({name: body[name] for name in body if name != "extra_key"})

        double.posts["/generate"] = without_salt
        found = update_findings(measure(examined(url), model, updates=True))
    assert found["weight update"].verdict == Verdict.OK
    assert found["cache over an update"].verdict == Verdict.FAIL
    assert "another salt finds the KV too" in found["cache over an update"].says


def test_an_engine_that_can_not_read_the_directory_stays_unchanged(model: Path) -> None:
    asked = []
    with sglang(model) as (double, url):
        update = double.posts["/update_weights_from_disk"]

        async def seeing_no_files(body: dict[str, Any]) -> Any:
            asked.append(body["model_path"])
            return await update(body | {"model_path": "/nowhere"})

        double.posts["/update_weights_from_disk"] = seeing_no_files
        found = update_findings(measure(examined(url), model, updates=True))
    assert found["weight update"].verdict == Verdict.FAIL
    assert "Failed to get weights iterator" in found["weight update"].says
    assert asked == [str(model)]


@pytest.mark.parametrize(
    ("is_silent", "says"),
    [(False, r"its own weights back.*Restart\s+it"), (True, r"timed out.*Restart\s+it")],
)
def test_an_engine_that_does_not_take_its_original_weights_raises(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool, says: str
) -> None:
    with sglang(model) as (double, url):
        update, loads = double.posts["/update_weights_from_disk"], []

        async def twice(body: dict[str, Any]) -> Any:
            loads.append(body)
            if len(loads) == 2 and is_silent:
                monkeypatch.setattr(doctor_examined, "LOAD_TIMEOUT_S", 0.2)
            if len(loads) > 2 and is_silent:
                await asyncio.sleep(2)
            is_refused = len(loads) > 2 and not is_silent
            return await update(body | ({"model_path": "/nowhere"} if is_refused else {}))

        double.posts["/update_weights_from_disk"] = twice
        with pytest.raises(EngineLost, match=says):
            measure(examined(url), model, updates=True)
    assert list(model.parent.iterdir()) == [model]


def test_altered_weights_have_the_models_files_names_and_types(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "served", dtype="bfloat16", shards=2)
    save_file({"scale": torch.ones(1, 1)}, model / "one.safetensors")  # has no deviation
    with altered(model) as directory:
        assert directory.parent == model.parent
        names = sorted(path.name for path in model.iterdir())
        assert sorted(path.name for path in directory.iterdir()) == names
        for name in (name for name in names if name.endswith(".safetensors")):
            before, now = load_file(model / name), load_file(directory / name)
            assert before.keys() == now.keys()
            for tensor in before:
                assert now[tensor].dtype == before[tensor].dtype
                is_same = before[tensor].dim() == 1 or tensor == "scale"
                assert torch.equal(now[tensor], before[tensor]) == is_same
    assert not directory.exists()


def test_an_engine_with_other_weights_than_the_models_is_not_updated(
    model: Path, tmp_path: Path
) -> None:
    trained = make_model_directory(tmp_path / "trained", seed=1)
    with sglang(trained) as (double, url):
        del double.posts["/update_weights_from_disk"]
        measured = measure(examined(url), model, updates=True)
    assert not measured.is_updated
    found = update_findings(measured)
    assert found["weight update"].verdict == Verdict.FAIL
    assert found["weight update"].says.startswith("skipped")


def test_an_update_test_without_a_model_is_refused(model: Path) -> None:
    with sglang(model) as (_, url), pytest.raises(ConfigError, match="--update needs --model"):
        measure(examined(url), updates=True)
