"""Requests by chance to the Tinker server: it serves other tenants on, and starts again."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tests.fuzz.fuzzed_tinker import FuzzedTinker

pytestmark = pytest.mark.wire


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_answered_and_others_are_served_on_also_by_a_server_started_again(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="uvicorn.error")  # warns of what is not HTTP
    server = FuzzedTinker(seed, tmp_path)
    server.feed(500, lambda number: None)

    assert server.fuzzed.failures == []
    assert server.fuzzed.bodies == 501
    assert server.fuzzed.refused > 100
    assert server.fuzzed.healthy == 6
