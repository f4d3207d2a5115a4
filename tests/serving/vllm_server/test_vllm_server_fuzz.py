"""Requests by chance to the vLLM-compatible server: it serves on, whatever it is sent."""

import logging
from pathlib import Path

import pytest

from tests.fuzz.fuzzed_http import FuzzedServer

pytestmark = pytest.mark.wire


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_answered_and_a_healthy_client_served_on(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="uvicorn.error")  # warns of what is not HTTP
    server = FuzzedServer(seed, tmp_path)
    server.feed(500, lambda number: None)

    assert server.fuzzed.failures == []
    assert server.fuzzed.bodies == 500
    assert server.fuzzed.refused > 100
    assert server.fuzzed.healthy > 2
