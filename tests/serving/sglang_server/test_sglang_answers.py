"""Answers of SGLang's routes beside those of a real SGLang 0.5.23 with the same model."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidegate
from tests.serving.sglang_server.sglang_calls import CALLS, RECORDED, answers, differences

pytestmark = pytest.mark.wire

NO_SGLANG = not os.environ.get("TIDEGATE_SGLANG_PYTHON")

UNLIKE = {"health while paused"}
"""Answers that differ on purpose: health is of the server here, and not of a pause, as in vLLM."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    answers: dict[str, Any] = msgspec.json.decode(RECORDED.read_bytes())
    return answers


@pytest.fixture(scope="module")
def found(server: tidegate.VLLMServer, model: Path) -> dict[str, Any]:
    return answers(server.url, model, server.control_token or "")


@pytest.mark.parametrize("name", [call.name for call in CALLS])
def test_an_answer_is_sglangs_field_by_field(
    name: str, recorded: dict[str, Any], found: dict[str, Any]
) -> None:
    differ = differences(name, recorded[name], found[name])
    assert bool(differ) == (name in UNLIKE), differ


@pytest.mark.skipif(NO_SGLANG, reason="wants SGLang in a Python of its own: make test-sglang")
@pytest.mark.timeout(900)
def test_sglang_answers_as_recorded(recorded: dict[str, Any], model: Path, tmp_path: Path) -> None:
    from tests.engine.external.test_real_sglang import KEY, started

    with started(model, tmp_path / "log") as url:
        real = answers(url, model, KEY)
    differ = {name: differences(name, each, real[name]) for name, each in recorded.items()}
    assert not any(differ.values()), differ
