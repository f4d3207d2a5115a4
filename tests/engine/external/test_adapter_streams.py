"""Streams and scores of an external engine that answers late, breaks off, or never."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from tidegate.engine.external.adapter import (
    Capabilities,
    EngineAdapter,
    ExternalScores,
    GeneratedChunk,
    GenerationRequest,
    ScoreRequest,
)
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.streams import Streams
from tidegate.engine.external.turns import read_turn
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import EngineGone, TidegateError
from tidegate.transport.messages import LENGTH, SamplingParams, Step, SubmitTurn
from tidegate.transport.scoring import ScoreFailed, ScoreTokens

ABLE = Capabilities(
    engine="tiny 1", context_tokens_max=64, running_turns_max=1, scores=frozenset({"logprobs"})
)
LIMITS = EngineLimits(
    max_running_turns=1,
    max_step_tokens=16,
    num_blocks=4,
    block_tokens=16,
    context_tokens_max=64,
    vocab_size=96,
)


class Slow(EngineAdapter):
    """An engine that answers preemption queries late."""

    capabilities = ABLE

    def __init__(self) -> None:
        self.taken, self.continues = asyncio.Event(), asyncio.Event()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        yield GeneratedChunk([5], [-1.0])
        self.taken.set()
        await self.continues.wait()
        yield GeneratedChunk([6], [-2.0], "length")

    async def preemptions(self) -> int | None:
        if self.continues.is_set():
            self.asked.set()
            await self.answers.wait()
        return 0


class Wire:
    """Link that records steps."""

    has_credit = True
    next_seq = 0

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def send_step(self, step: Step, *, continues_step: bool = False) -> None:
        self.steps.append(step)


async def test_a_turns_end_is_sent_without_waiting_for_tokens_of_other_turns() -> None:
    wire = Wire()
    batcher = StepMessageBatcher(cast(OrchestratorLink, wire))
    batcher.rows.add(3, [5], [-1.0], prefill=None)
    batcher.flush_soon()
    await asyncio.sleep(0)
    assert wire.steps == []
    batcher.rows.end(7, LENGTH)
    batcher.flush_next()
    await asyncio.sleep(0)
    (step,) = wire.steps
    assert np.frombuffer(step.turns, "<u4").tolist() == [3, 7]


async def test_tokens_are_of_the_version_they_came_under_however_long_the_check_of_kv_takes() -> (
    None
):
    wire, engine, over = Wire(), Slow(), asyncio.Event()
    batcher = StepMessageBatcher(cast(OrchestratorLink, wire))

    def on_request_ended(
        turn: object, error: TidegateError | None, *, is_held: bool = False
    ) -> None:
        assert error is None
        over.set()

    streams = Streams(engine, "v0", batcher=batcher, on_request_ended=on_request_ended)
    prompt = np.arange(3, dtype="<i4").tobytes()
    message = SubmitTurn(turn=7, token_ids=prompt, sampling=SamplingParams(max_tokens=2))
    async with asyncio.timeout(10):
        streams.start(read_turn(message, 0, limits=LIMITS, capabilities=ABLE), version=0)
        await engine.taken.wait()
        await streams.set_weights("v1", {})
        batcher.version = 1
        engine.continues.set()
        await engine.asked.wait()
        assert batcher.flush_now()
        batcher.version = 2  # the next weights are live before the answer is there
        engine.answers.set()
        await over.wait()
    assert batcher.flush_now()
    reported = [
        (step.version, np.frombuffer(step.token_ids, "<i4").tolist()) for step in wire.steps
    ]
    assert [version for version, tokens in reported if 6 in tokens] == [1]
    assert reported[-1] == (2, [])
    assert wire.steps[-1].finish == bytes([LENGTH])


def test_turns_share_kv_with_turns_of_their_own_salt_and_weights_only() -> None:
    salts = [
        read_turn(
            SubmitTurn(
                turn=0,
                token_ids=np.array([1, 2], "<i4").tobytes(),
                sampling=SamplingParams(max_tokens=2, cache_salt=failure),
            ),
            0,
            limits=LIMITS,
            capabilities=ABLE,
        )
        .request(0, of_weights)
        .salt
        for of_weights in ("v0", "v0.1", "v1")
        for failure in ("", "1", "mine")
    ]
    assert salts[0] == "v0"
    assert len(set(salts)) == 9


# ------------------------------------------------------------------------------ scores


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
