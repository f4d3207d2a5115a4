import asyncio

from tidegate.errors import BadFrame
from tidegate.orchestrator.scheduler.outbox import (
    CONTEXT_BYTES_TOGETHER_MAX,
    TURNS_TOGETHER_MAX,
    Outbox,
)
from tidegate.transport.limits import FRAME_BYTES_MAX_BY_KIND, SMALL_FRAME_BYTES_MAX
from tidegate.transport.messages import (
    CancelTurn,
    Message,
    SamplingParams,
    SubmitTurn,
    SubmitTurns,
)
from tidegate.transport.scoring import ScoreTokens
from tidegate.transport.zeromq import encode_frame

PLAIN = SamplingParams(max_tokens=8)


def turn(handle: int, context_bytes: int = 4, sampling: SamplingParams = PLAIN) -> SubmitTurn:
    return SubmitTurn(turn=handle, token_ids=bytes(context_bytes), sampling=sampling)


class Sent:
    """Records what an outbox sends; all engines but ``plain`` take turns together."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.reported: list[BaseException] = []
        self.outbox = Outbox(
            self._send,
            supports_submit_turns=lambda engine: engine != "plain",
            on_refused=lambda engine, message, error: self.refused.append((engine, message)),
            on_error=self.reported.append,
        )
        self.refused: list[tuple[str, Message]] = []

    def _send(self, engine: str, message: Message) -> None:
        encode_frame(message)
        self.sent.append((engine, message))


async def test_a_posted_message_that_cannot_be_sent_is_reported_not_only_logged() -> None:
    sent: list[str] = []
    reported: list[BaseException] = []

    def send(engine: str, message: Message) -> None:
        if engine == "broken":
            raise BadFrame("too large")
        sent.append(engine)

    outbox = Outbox(
        send,
        supports_submit_turns=lambda engine: True,
        on_refused=lambda *_: None,
        on_error=reported.append,
    )
    outbox.post("a", CancelTurn(turn=1))
    outbox.post("broken", CancelTurn(turn=2))
    await asyncio.sleep(0)
    assert sent == ["a"]
    assert [str(error) for error in reported] == ["too large"]


async def test_a_turn_that_no_frame_holds_is_refused_and_all_else_is_sent() -> None:
    wire = Sent()
    huge = turn(2, FRAME_BYTES_MAX_BY_KIND["submit_turn"])
    score = ScoreTokens(request_id=7, token_ids=bytes(FRAME_BYTES_MAX_BY_KIND["score_tokens"]))
    for message in (turn(1), huge, score, turn(3)):
        wire.outbox.post("a", message)
    await asyncio.sleep(0)
    assert wire.sent == [("a", turn(1)), ("a", turn(3))]
    await asyncio.sleep(0)
    assert [type(message) for _, message in wire.refused] == [SubmitTurn, ScoreTokens]
    assert wire.reported == []


async def test_turns_for_one_engine_travel_together_and_before_what_is_said_of_them() -> None:
    wire = Sent()
    wire.outbox.post("a", turn(1))
    wire.outbox.post("b", turn(2))
    wire.outbox.post("a", turn(3))
    wire.outbox.post("a", CancelTurn(turn=3))
    wire.outbox.post("a", turn(4))
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [
        ("a", SubmitTurns(turns=[turn(1), turn(3)])),
        ("a", CancelTurn(turn=3)),
        ("b", turn(2)),
        ("a", turn(4)),
    ]


async def test_what_is_sent_at_once_comes_after_the_turns_of_before() -> None:
    wire = Sent()
    wire.outbox.post("a", turn(1))
    wire.outbox.post("a", turn(2))
    wire.outbox.send([("a", CancelTurn(turn=1))])
    sent = [("a", SubmitTurns(turns=[turn(1), turn(2)])), ("a", CancelTurn(turn=1))]
    assert wire.sent == sent
    await asyncio.sleep(0)
    assert wire.sent == sent


def test_an_engine_that_has_not_said_so_gets_each_turn_by_itself() -> None:
    wire = Sent()
    wire.outbox.send([("plain", turn(1)), ("plain", turn(2))])
    assert wire.sent == [("plain", turn(1)), ("plain", turn(2))]


def test_no_message_holds_more_turns_than_its_frame_may() -> None:
    wire = Sent()
    wire.outbox.send([("a", turn(handle)) for handle in range(TURNS_TOGETHER_MAX + 2)])
    assert wire.sent == [
        ("a", SubmitTurns(turns=[turn(handle) for handle in range(TURNS_TOGETHER_MAX)])),
        ("a", SubmitTurns(turns=[turn(TURNS_TOGETHER_MAX), turn(TURNS_TOGETHER_MAX + 1)])),
    ]


def test_long_contexts_travel_in_parts() -> None:
    wire = Sent()
    half = CONTEXT_BYTES_TOGETHER_MAX // 2
    wire.outbox.send([("a", turn(1, half)), ("a", turn(2, half)), ("a", turn(3, 8 * half))])
    assert wire.sent == [
        ("a", SubmitTurns(turns=[turn(1, half), turn(2, half)])),
        ("a", turn(3, 8 * half)),  # more than turns together may have
    ]


def test_turns_whose_options_are_too_long_for_one_frame_travel_in_more() -> None:
    wire = Sent()
    long = SamplingParams(max_tokens=8, stop_strings=["x" * SMALL_FRAME_BYTES_MAX] * 20)
    turns = [turn(handle, sampling=long) for handle in range(5)]
    wire.outbox.send([("a", each) for each in turns])
    assert wire.sent == [("a", SubmitTurns(turns=turns[:2])), ("a", SubmitTurns(turns=turns[2:]))]
