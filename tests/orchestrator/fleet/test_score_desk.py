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
from tidegate.orchestrator.core.turns import LOSSES_MAX
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.fleet.scores import Asked, Score, TokenScores, ask_logprobs, ask_rewards
from tidegate.transport import scoring
from tidegate.transport.messages import Message
from tidegate.transport.scoring import CancelScore, Scored, ScoreTokens
from tidegate.transport.streams import ReceiveWindow


@dataclass
class Run:
    """A :class:`ScoreDispatcher`, its engines, and the messages sent to them."""

    engines: dict[str, Engine] = field(default_factory=dict)
    sent: list[tuple[str, Message]] = field(default_factory=list)
    waiting: "set[asyncio.Future[Score]]" = field(default_factory=set)
    live_version: int = 0

    def __post_init__(self) -> None:
        self.desk = ScoreDispatcher(
            self,
            waiting=self.waiting,
            live_version=lambda: self.live_version,
            post=lambda engine, message: self.sent.append((engine, message)),
        )

    def join(self, name: str, *, slots: int = 4, wants: tuple[str, ...] = ("logprobs",)) -> None:
        greeting = replace(hello(name), max_running_turns=slots, scores=list(wants))
        self.engines[name] = Engine(greeting, ReceiveWindow(4, epoch=1, next_seq=0), 0.0, 0)
        self.desk.joined(name)

    def lose(self, name: str) -> None:
        del self.engines[name]
        self.desk.left(name)

    def requests(self) -> list[tuple[str, int]]:
        return [(name, m.request) for name, m in self.sent if isinstance(m, ScoreTokens)]


def asked(tokens: int = 3, top: int = 0) -> Asked:
    return ask_logprobs([list(range(tokens))], 1, top, 1.0)[0]


def answer(request: int, logprobs: list[float], *, last: bool = True, version: int = 0) -> Scored:
    column = np.array(logprobs, "<f4").tobytes()
    return Scored(request=request, version=version, logprobs=column, last=last)


async def test_requests_go_to_the_engine_with_most_room_and_wait_for_it() -> None:
    run = Run()
    run.join("a", slots=4)
    run.join("b", slots=2)
    futures = [run.desk.ask(asked()) for _ in range(5)]
    assert [name for name, _ in run.requests()] == ["a", "b", "a"]
    run.desk.heard("a", answer(0, [-1.0, -2.0]))
    said = await futures[0]
    assert isinstance(said, TokenScores)
    assert (said.version, said.engine, said.start) == (0, "a", 1)
    assert said.logprobs.tolist() == [-1.0, -2.0]
    assert said.top_ids.shape == (2, 0)
    await asyncio.sleep(0)
    assert run.requests()[3:] == [("a", 3)]


async def test_parts_of_an_answer_are_put_together() -> None:
    run = Run()
    run.join("a")
    future = run.desk.ask(asked())
    run.desk.heard("a", answer(0, [-1.0], last=False))
    assert not future.done()
    run.desk.heard("a", answer(0, [-2.0]))
    said = await future
    assert isinstance(said, TokenScores)
    assert said.logprobs.tolist() == [-1.0, -2.0]


async def test_what_an_engine_loses_is_asked_elsewhere_from_the_beginning() -> None:
    run = Run()
    run.join("a")
    future = run.desk.ask(asked())
    run.desk.heard("a", answer(0, [-1.0], last=False))
    run.lose("a")
    run.join("b")
    run.desk.heard("a", answer(0, [-9.0]))  # from the dead: nobody's
    run.desk.heard("b", answer(1, [-3.0, -4.0]))
    said = await future
    assert isinstance(said, TokenScores)
    assert said.logprobs.tolist() == [-3.0, -4.0]


async def test_a_connection_that_was_lost_costs_no_answer_however_often() -> None:
    run = Run()
    run.join("a")
    future = run.desk.ask(asked())
    for _ in range(2 * LOSSES_MAX):
        run.join("a")
    assert run.requests()[-1] == ("a", 2 * LOSSES_MAX)
    run.desk.heard("a", answer(2 * LOSSES_MAX, [-1.0, -2.0]))
    await future


async def test_a_request_that_ends_every_engine_is_given_up_with_its_size() -> None:
    run = Run()
    future = run.desk.ask(asked(tokens=7))
    for number in range(LOSSES_MAX):
        run.join(f"e{number}")
        run.lose(f"e{number}")
    with pytest.raises(EngineLost, match=r"3 engines were lost .* 7 tokens"):
        await future


async def test_engines_with_old_weights_are_not_asked() -> None:
    run = Run(live_version=1)
    run.join("a")
    run.desk.ask(asked())
    assert run.requests() == []
    run.engines["a"].weight_version = 1
    run.desk.advance()
    assert run.requests() == [("a", 0)]


async def test_whoever_does_not_wait_any_more_is_told_to_engines() -> None:
    run = Run()
    run.join("a", slots=2)
    first, second = run.desk.ask(asked()), run.desk.ask(asked())
    first.cancel()
    second.cancel()
    await asyncio.sleep(0)
    assert run.sent[1:] == [("a", CancelScore(request=0))]
    run.desk.ask(asked())
    assert run.requests() == [("a", 0), ("a", 1)]
    assert len(run.waiting) == 1


async def test_what_no_engine_tells_is_refused_at_once() -> None:
    run = Run()
    run.join("a", wants=("logprobs", "embedding"))
    future = run.desk.ask(ask_rewards([[1, 2]])[0])
    with pytest.raises(ScoreRefused, match="tells rewards; they tell embedding, logprobs"):
        await future


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([answer(0, [-1.0])], "1 log-probs for 2 tokens"),
        ([answer(0, [-1.0, 0.5])], "no logarithm of a probability"),
        ([answer(0, [-1.0, float("nan")])], "no logarithm of a probability"),
        ([answer(0, [-1.0], last=False), answer(0, [-1.0], version=1)], "of versions .0, 1."),
        ([Scored(request=0, version=0, logprobs=b"12345")], "5 bytes of float32"),
        ([Scored(request=0, version=0, top_ids=b"12345")], "5 bytes of int32"),
        ([scoring.ScoreRefused(request=0, message="too long")], "too long"),
    ],
)
async def test_an_engine_that_answers_nonsense_is_not_believed(
    parts: list[Scored | scoring.ScoreRefused], told: str
) -> None:
    run = Run()
    run.join("a")
    future = run.desk.ask(asked())
    for part in parts:
        run.desk.heard("a", part)
    with pytest.raises(ScoreRefused, match=told):
        await future


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((["a text"], 1, 0, 1.0), "encode it"),
        (([[1.5, 2.0]], 1, 0, 1.0), "float64"),
        (([[]], 1, 0, 1.0), "to score is empty"),
        (([[1, -2]], 1, 0, 1.0), "ids in"),
        (([[1, 2]], 0, 0, 1.0), "start must be in"),
        (([[1, 2]], [1, 1], 0, 1.0), "2 positions for 1 sequences"),
        (([[1, 2]], 1, 129, 1.0), "top_logprobs must be in"),
        (([[1, 2]], True, 0, 1.0), "start must be a whole number, got True"),
        (([[1, 2]], [1.7], 0, 1.0), "start must be a whole number, got 1.7"),
        (([[1, 2]], 1, 2.5, 1.0), "top_logprobs must be a whole number, got 2.5"),
        (([[1, 2]], 1, 0, "hot"), "temperature must be a number, got 'hot'"),
        ((None, 1, 0, 1.0), "several lists of token ids, got NoneType"),
    ],
)
def test_what_could_not_be_sent_is_refused_at_the_door(arguments: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ask_logprobs(*arguments)


def test_positions_may_be_numbers_of_numpy_and_torch() -> None:
    sequences: Any = np.array([[1, 2, 3], [4, 5, 6]])
    top: Any = np.int64(3)
    starts: list[Any] = [np.int64(2), torch.tensor(2), [2, np.int32(2)], torch.tensor([2, 2])]
    for start in starts:
        asked = ask_logprobs(sequences, start, top, 0.5)
        assert [one.message(0).start for one in asked] == [2, 2]
        assert all(type(one.start) is type(one.top_logprobs) is int for one in asked)
