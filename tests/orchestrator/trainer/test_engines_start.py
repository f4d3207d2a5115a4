"""What a run says of its engines while they start: what it waits for, and what they warn of."""

import logging
from pathlib import Path

import pytest

import tidegate
from tests.models import make_model_directory
from tidegate.orchestrator.trainer import run

pytestmark = pytest.mark.wire


async def test_engines_without_a_compiler_tell_the_runs_user_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model_directory(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "tidegate"):
        async with tidegate.serve(model=model, engines=2):
            pass
    (said,) = [r.getMessage() for r in caplog.records if "compiler" in r.getMessage()]
    assert said.startswith("engine=engine-")
    assert "in two to three times the CPU time; install a C++ compiler" in said


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_slow_start_says_what_it_waits_for_and_a_quick_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_slow: bool
) -> None:
    monkeypatch.setattr(run, "SLOW_START_S", 0.0 if is_slow else 600.0)
    model = make_model_directory(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "tidegate"):
        async with tidegate.serve(model=model, engines=2, run_directory=tmp_path / "run"):
            pass
    said = [r.getMessage() for r in caplog.records if "start=waiting" in r.getMessage()]
    assert len(said) == is_slow
    if is_slow:
        assert said[0].startswith("start=waiting engines=0/2: they import torch, load the model")
        assert said[0].endswith(str(tmp_path / "run" / "logs"))
