"""Random request bodies harm neither the gateway nor an agent beside."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzed_http import FuzzedGateway
from tests.serving.gateway.gateway_clients import CHAT, END, session_of
from tidegate.serving.gateway.gateway import Gateway

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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = ["model", "temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs",
          "logit_bias", "tools", "tool_choice", "max_tokens", "stream", "stream_options",
          "response_format", "stop_token_ids", "return_token_ids", "prompt"]  # fmt: skip
MESSAGE = JSON | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON, "content": JSON},
    optional={"tool_calls": JSON, "name": JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON}, optional=dict.fromkeys(FIELDS, JSON)
)


@settings(max_examples=40, deadline=None)
@given(body=BODY | JSON, path=st.sampled_from([CHAT, "/v1/completions", "/tokenize"]))
async def test_no_body_kills_it_or_stays_without_an_answer(
    tmp_path_factory: pytest.TempPathFactory, body: Any, path: str
) -> None:
    gateway = Gateway()
    try:
        async with session_of(gateway, tmp_path_factory.getbasetemp()) as (talk, _, client):
            talk.engine.words += [f"ok{END}"] * 64
            answer = await client.post(path, content=json.dumps(body))
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]
            talk.check()
    finally:
        gateway.close()
