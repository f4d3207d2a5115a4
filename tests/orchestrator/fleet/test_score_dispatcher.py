"""Each scoring request gets one whole answer, whatever happens to its engines."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.orchestrator.fleet.test_fleet import hello
from tidegate.errors import ConfigError, EngineLost, ScoreRefused
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.fleet.scores import (
    Score,
    ScoreQuery,
    TokenScores,
    logprob_queries,
    reward_queries,
)
from tidegate.transport import scoring
from tidegate.transport.messages import Message
from tidegate.transport.scoring import CancelScore, ScoreResult, ScoreTokens
from tidegate.transport.streams import ReceiveWindow


@dataclass
class Run:
    """A :class:`ScoreDispatcher`, its engines, and the messages sent to them."""

    engines: dict[str, Engine] = field(default_factory=dict)
    sent: list[tuple[str, Message]] = field(default_factory=list)
    waiting: "set[asyncio.Future[Score]]" = field(default_factory=set)
    live_version: int = 0

    def __post_init__(self) -> None:
        self.dispatcher = ScoreDispatcher(
            self.engines,
            pending=self.waiting,
            live_version=lambda: self.live_version,
            post=lambda engine, message: self.sent.append((engine, message)),
        )

    def join(self, name: str, *, slots: int = 4, wants: tuple[str, ...] = ("logprobs",)) -> None:
        greeting = replace(hello(name), max_running_turns=slots, score_kinds=list(wants))
        self.engines[name] = Engine(greeting, ReceiveWindow(4, epoch=1, next_seq=0), 0.0, 0)
        self.dispatcher.joined(name)

    def lose(self, name: str) -> None:
        del self.engines[name]
        self.dispatcher.left(name)

    def requests(self) -> list[tuple[str, int]]:
        return [(name, m.request_id) for name, m in self.sent if isinstance(m, ScoreTokens)]


def query(tokens: int = 3, top: int = 0) -> ScoreQuery:
    return logprob_queries([list(range(tokens))], 1, top, 1.0)[0]


def answer(
    request: int, logprobs: list[float], *, last: bool = True, version: int = 0
) -> ScoreResult:
    column = np.array(logprobs, "<f4").tobytes()
    return ScoreResult(request_id=request, version=version, logprobs=column, is_last=last)


async def test_requests_go_to_the_least_loaded_engine_and_wait_for_free_slots() -> None:
    run = Run()
    run.join("a", slots=4)
    run.join("b", slots=2)
    futures = [run.dispatcher.submit(query()) for _ in range(5)]
    assert [name for name, _ in run.requests()] == ["a", "b", "a"]
    run.dispatcher.received("a", answer(0, [-1.0, -2.0]))
    score = await futures[0]
    assert isinstance(score, TokenScores)
    assert (score.version, score.engine, score.start) == (0, "a", 1)
    assert score.logprobs.tolist() == [-1.0, -2.0]
    assert score.top_ids.shape == (2, 0)
    await asyncio.sleep(0)
    assert run.requests()[3:] == [("a", 3)]


async def test_parts_of_an_answer_are_put_together() -> None:
    run = Run()
    run.join("a")
    future = run.dispatcher.submit(query())
    run.dispatcher.received("a", answer(0, [-1.0], last=False))
    assert not future.done()
    run.dispatcher.received("a", answer(0, [-2.0]))
    score = await future
    assert isinstance(score, TokenScores)
    assert score.logprobs.tolist() == [-1.0, -2.0]


async def test_a_request_of_a_lost_engine_is_sent_to_another_from_the_beginning() -> None:
    run = Run()
    run.join("a")
    future = run.dispatcher.submit(query())
    run.dispatcher.received("a", answer(0, [-1.0], last=False))
    run.lose("a")
    run.join("b")
    run.dispatcher.received("a", answer(0, [-9.0]))  # late answer of a lost engine: ignored
    run.dispatcher.received("b", answer(1, [-3.0, -4.0]))
    score = await future
    assert isinstance(score, TokenScores)
    assert score.logprobs.tolist() == [-3.0, -4.0]


async def test_reconnects_never_fail_a_request() -> None:
    run = Run()
    run.join("a")
    future = run.dispatcher.submit(query())
    for _ in range(2 * CONSECUTIVE_LOSSES_MAX):
        run.join("a")
    assert run.requests()[-1] == ("a", 2 * CONSECUTIVE_LOSSES_MAX)
    run.dispatcher.received("a", answer(2 * CONSECUTIVE_LOSSES_MAX, [-1.0, -2.0]))
    await future


async def test_a_request_that_crashes_every_engine_fails_with_its_size() -> None:
    run = Run()
    future = run.dispatcher.submit(query(tokens=7))
    for number in range(CONSECUTIVE_LOSSES_MAX):
        run.join(f"e{number}")
        run.lose(f"e{number}")
    with pytest.raises(EngineLost, match=r"3 engines were lost .* 7 tokens"):
        await future


async def test_engines_with_old_weights_get_no_requests() -> None:
    run = Run(live_version=1)
    run.join("a")
    run.dispatcher.submit(query())
    assert run.requests() == []
    run.engines["a"].weight_version = 1
    run.dispatcher.advance()
    assert run.requests() == [("a", 0)]


async def test_a_cancelled_request_is_cancelled_on_its_engine() -> None:
    run = Run()
    run.join("a", slots=2)
    first, second = run.dispatcher.submit(query()), run.dispatcher.submit(query())
    first.cancel()
    second.cancel()
    await asyncio.sleep(0)
    assert run.sent[1:] == [("a", CancelScore(request_id=0))]
    run.dispatcher.submit(query())
    assert run.requests() == [("a", 0), ("a", 1)]
    assert len(run.waiting) == 1


async def test_a_score_that_no_engine_computes_is_refused_at_once() -> None:
    run = Run()
    run.join("a", wants=("logprobs", "embedding"))
    future = run.dispatcher.submit(reward_queries([[1, 2]])[0])
    with pytest.raises(ScoreRefused, match="computes rewards; they compute embedding, logprobs"):
        await future


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([answer(0, [-1.0])], "1 log-probs for 2 tokens"),
        ([answer(0, [-1.0, 0.5])], "NaN or above 0"),
        ([answer(0, [-1.0, float("nan")])], "NaN or above 0"),
        ([answer(0, [-1.0], last=False), answer(0, [-1.0], version=1)], "of versions .0, 1."),
        ([ScoreResult(request_id=0, version=0, logprobs=b"12345")], "5 bytes of float32"),
        ([ScoreResult(request_id=0, version=0, top_ids=b"12345")], "5 bytes of int32"),
        ([scoring.ScoreFailed(request_id=0, message="too long")], "too long"),
    ],
)
async def test_a_malformed_answer_fails_its_request(
    parts: list[ScoreResult | scoring.ScoreFailed], message: str
) -> None:
    run = Run()
    run.join("a")
    future = run.dispatcher.submit(query())
    for part in parts:
        run.dispatcher.received("a", part)
    with pytest.raises(ScoreRefused, match=message):
        await future


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a text"], 1, 0, 1.0), "encode it"),
        (([[1.5, 2.0]], 1, 0, 1.0), "float64"),
        (([[]], 1, 0, 1.0), "to score is empty"),
        (([[1, -2]], 1, 0, 1.0), "ids in"),
        (([[1, 2]], 0, 0, 1.0), "start must be in"),
        (([[1, 2]], [1, 1], 0, 1.0), "one for each of 1 sequences, got 2"),
        (([[1, 2]], 1, 129, 1.0), "top_logprobs must be in"),
        (([[1, 2]], True, 0, 1.0), "start must be a whole number, got True"),
        (([[1, 2]], [1.7], 0, 1.0), "start must be a whole number, got 1.7"),
        (([[1, 2]], 1, 2.5, 1.0), "top_logprobs must be a whole number, got 2.5"),
        (([[1, 2]], 1, 0, "hot"), "temperature must be a number, got 'hot'"),
        ((None, 1, 0, 1.0), "several lists of token ids, got NoneType"),
    ],
)
def test_invalid_arguments_are_refused_before_sending(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        logprob_queries(*arguments)


def test_positions_may_be_numbers_of_numpy_and_torch() -> None:
    sequences: Any = np.array([[1, 2, 3], [4, 5, 6]])
    top: Any = np.int64(3)
    starts: list[Any] = [np.int64(2), torch.tensor(2), [2, np.int32(2)], torch.tensor([2, 2])]
    for start in starts:
        queries = logprob_queries(sequences, start, top, 0.5)
        assert [one.message(0).start for one in queries] == [2, 2]
        assert all(type(one.start) is type(one.top_logprobs) is int for one in queries)
