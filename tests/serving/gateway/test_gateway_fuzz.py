"""Random request bodies harm neither the gateway nor an agent beside."""

import logging
from pathlib import Path

import pytest

from tests.fuzz.fuzzed_http import FuzzedGateway

pytestmark = pytest.mark.wire


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_malformed_body_is_answered_and_a_healthy_agent_served_on(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="uvicorn.error")  # warns of each that is not HTTP
    fuzzed = FuzzedGateway(seed, tmp_path)
    await fuzzed.feed(400, lambda number: None)

    assert fuzzed.failures == []
    assert fuzzed.bodies == 400
    assert fuzzed.refused > 200
    assert fuzzed.healthy == 2
