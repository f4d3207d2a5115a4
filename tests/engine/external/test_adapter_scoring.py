"""Scoring requests to an external engine always end, also if the engine fails."""

import asyncio
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from tidegate.engine.external.adapter import (
    Capabilities,
    EngineAdapter,
    ExternalScores,
    ScoreRequest,
)
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.link import OrchestratorLink
from tidegate.errors import EngineGone, TidegateError
from tidegate.transport.scoring import ScoreFailed, ScoreTokens

ABLE = Capabilities(
    engine="tiny 1", context_tokens_max=64, running_turns_max=1, scores=frozenset({"logprobs"})
)

ASKED = ScoreTokens(
    request_id=1, token_ids=np.arange(4, dtype="<i4").tobytes(), score_kind="logprobs", start=1
)


class Failing(EngineAdapter):
    """An engine that answers no scoring request."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.capabilities = ABLE

    async def score(self, request: ScoreRequest) -> ExternalScores:
        raise self._error


class Silent:
    """A link on which no answer may be sent, because another engine gets the request."""

    def send(self, message: object) -> None:
        raise AssertionError(f"said {message}")


def test_a_request_for_an_adapter_is_refused_because_no_engine_of_others_scores_with_one() -> None:
    sent: list[object] = []
    link = cast(OrchestratorLink, SimpleNamespace(send=sent.append))
    adapter = Failing(KeyError())
    queue = ExternalScoreQueue(adapter, link, on_gone=lambda error: None)
    queue.submit(replace(ASKED, adapter="a"))
    [refused] = sent
    assert isinstance(refused, ScoreFailed)
    assert "does not score logprobs with adapters" in refused.message


@pytest.mark.parametrize(
    "error",
    [EngineGone("the connection broke"), KeyError("prompt_logprobs")],
    ids=["a broken connection", "an answer of another form"],
)
async def test_a_request_that_an_engine_breaks_off_gives_up_the_engine_and_is_not_refused(
    error: Exception,
) -> None:
    gone: asyncio.Future[TidegateError] = asyncio.get_running_loop().create_future()
    adapter = Failing(error)
    queue = ExternalScoreQueue(adapter, cast(OrchestratorLink, Silent()), on_gone=gone.set_result)
    queue.submit(ASKED)
    queue.start(version=3)
    async with asyncio.timeout(10):
        assert isinstance(await gone, EngineGone)
