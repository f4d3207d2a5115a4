"""The Ray actor of an engine, without Ray: how it reports its end."""

import io
import sys
from pathlib import Path

import pytest

from tidegate.integrations.ray.on_ray import DEFECT, RayEngine
from tidegate.orchestrator.fleet.processes import WORKER

pytestmark = pytest.mark.wire


class StderrOfRay(io.StringIO):
    """In an actor, ``sys.stderr.write`` returns None."""

    def write(self, text: str) -> None:  # type: ignore[override]
        super().write(text)


def test_an_engine_that_cannot_load_its_model_returns_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := StderrOfRay())
    arguments = ["--connect", "tcp://127.0.0.1:1", "--model", str(tmp_path), "--engine", "e"]
    status, why = RayEngine(arguments, None).serve()
    assert status not in (0, DEFECT)
    assert "config.json" in why
    assert why in stderr.getvalue()


def test_an_engine_that_fails_returns_its_error_before_its_process_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", StderrOfRay())

    def main(arguments: list[str], keys: object) -> int:
        sys.stderr.write("error: something that only a fresh process mends\n")
        return DEFECT

    monkeypatch.setattr(f"{WORKER}.main", main)
    assert RayEngine([], None).serve() == (DEFECT, "something that only a fresh process mends")
