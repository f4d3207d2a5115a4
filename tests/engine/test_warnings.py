"""Warnings of engines reach the user of the run that they join, each text once."""

import logging
from pathlib import Path

import pytest

import tidegate
from tests.models import make_model_directory

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
