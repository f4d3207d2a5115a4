"""`tidegate doctor --update`: weights and prefix cache over weight updates."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tidegate
from tests.engine.external.sglang_double import SglangDouble, make_app
from tests.models import make_model_directory
from tests.served_app import served
from tidegate.cli import main
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


def test_an_update_test_serves_new_weights_and_then_the_original_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_directory(tmp_path / "models" / "served")
    with sglang(model) as (double, url):
        arguments = ["tidegate", "doctor", url, "--model", str(model), "--update", "--json"]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert double.path == str(model)
        assert measure(examined(url), model).mismatch.mean < 1e-4  # type: ignore[union-attr]
    report = json.loads(capsys.readouterr().out)
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
    with tidegate.vllm_server(model=model, **about) as server:
        monkeypatch.setenv("TIDEGATE_ENGINE_KEY", server.control_token or "")
        found = update_findings(measure(examined(server.url), model, updates=True))
    assert {check: one.verdict for check, one in found.items()} == dict.fromkeys(CHECKS, Verdict.OK)
    assert "even if it does not ask" in found["cache over an update"].says


def test_a_cache_that_a_clearing_update_keeps_is_detected(model: Path) -> None:
    with sglang(model) as (double, url):
        update = double.posts["/update_weights_from_disk"]

        async def without_flushing(body: dict[str, Any]) -> Any:
            return await update(body | {"flush_cache": False})

        double.posts["/update_weights_from_disk"] = without_flushing
        found = update_findings(measure(examined(url), model, updates=True))
    assert found["weight update"].verdict == Verdict.FAIL
    assert "matches neither weights" in found["weight update"].says


Update = Callable[[dict[str, Any]], Awaitable[Any]]


def finding_of_an_update(model: Path, changed: Callable[[Any, Update], Update]) -> Finding:
    """Judge a server whose route for updates is replaced by ``changed(server, route)``."""
    with sglang(model) as (double, url):
        route = "/update_weights_from_disk"
        double.posts[route] = changed(double, double.posts[route])
        finding: Finding = update_findings(measure(examined(url), model, updates=True))[
            "weight update"
        ]
    return finding


def test_an_update_that_skips_one_matrix_is_detected(model: Path) -> None:
    def but_one(double: Any, update: Update) -> Update:
        left = double.model.state_dict()["model.layers.0.mlp.down_proj.weight"]

        async def updated(body: dict[str, Any]) -> Any:
            before = left.clone()
            try:
                return await update(body)
            finally:
                left.copy_(before)

        return updated

    found = finding_of_an_update(model, but_one)
    assert found.verdict == Verdict.FAIL
    assert "matches neither weights" in found.says


def test_an_update_that_changes_nothing_is_detected(model: Path) -> None:
    def to_its_own(double: Any, update: Update) -> Update:
        return lambda body: update(body | {"model_path": str(model)})

    found = finding_of_an_update(model, to_its_own)
    assert found.verdict == Verdict.FAIL
    assert "computes with the old ones" in found.says


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


def test_an_engine_that_can_not_read_the_directory_stays_unchanged(
    model: Path, tmp_path: Path
) -> None:
    elsewhere = make_model_directory(tmp_path / "elsewhere")
    with sglang(elsewhere) as (double, url):
        double.posts["/update_weights_from_disk"] = refuse = Refusing(double)
        found = update_findings(measure(examined(url), elsewhere, updates=True))
    assert found["weight update"].verdict == Verdict.FAIL
    assert "Failed to get weights iterator" in found["weight update"].says
    assert refuse.asked == [str(elsewhere)]


class Refusing:
    """An engine that sees no files."""

    def __init__(self, double: SglangDouble) -> None:
        self._update = double.posts["/update_weights_from_disk"]
        self.asked: list[str] = []

    async def __call__(self, body: dict[str, Any]) -> Any:
        self.asked.append(body["model_path"])
        return await self._update(body | {"model_path": "/nowhere"})


def test_an_engine_that_refuses_its_original_weights_raises(model: Path) -> None:
    with sglang(model) as (double, url):
        update, loads = double.posts["/update_weights_from_disk"], []

        async def twice(body: dict[str, Any]) -> Any:
            loads.append(body)
            path = body["model_path"] if len(loads) <= 2 else "/nowhere"
            return await update(body | {"model_path": path})

        double.posts["/update_weights_from_disk"] = twice
        with pytest.raises(EngineLost, match=r"its own weights back.*Restart\s+it"):
            measure(examined(url), model, updates=True)
    assert list(model.parent.iterdir()) == [model]


def test_an_engine_that_times_out_on_its_original_weights_raises(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sglang(model) as (double, url):
        update, loads = double.posts["/update_weights_from_disk"], []

        async def silent_from_the_third_on(body: dict[str, Any]) -> Any:
            loads.append(body)
            if len(loads) == 2:
                monkeypatch.setattr(doctor_examined, "LOAD_TIMEOUT_S", 0.2)
            if len(loads) > 2:
                await asyncio.sleep(2)
            return await update(body)

        double.posts["/update_weights_from_disk"] = silent_from_the_third_on
        with pytest.raises(EngineLost, match=r"timed out.*Restart\s+it"):
            measure(examined(url), model, updates=True)
    assert list(model.parent.iterdir()) == [model]


def test_a_matrix_of_one_number_is_not_altered(tmp_path: Path) -> None:
    save_file({"scale": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with altered(tmp_path) as directory:
        assert torch.equal(load_file(directory / "model.safetensors")["scale"], torch.ones(1, 1))


def test_altered_weights_have_the_models_files_names_and_types(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "served", dtype="bfloat16", shards=2)
    with altered(model) as directory:
        assert directory.parent == model.parent
        names = sorted(path.name for path in model.iterdir())
        assert sorted(path.name for path in directory.iterdir()) == names
        for name in (name for name in names if name.endswith(".safetensors")):
            before, now = load_file(model / name), load_file(directory / name)
            assert before.keys() == now.keys()
            for tensor in before:
                assert now[tensor].dtype == before[tensor].dtype
                assert torch.equal(now[tensor], before[tensor]) == (before[tensor].dim() == 1)
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
