"""Engines that keep sessions get a message when no turn will follow in one."""

import asyncio

from msgspec.structs import replace

from tests.orchestrator.fleet.test_fleet import hello
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.fleet.open_sessions import SESSIONS_PER_MESSAGE, OpenSessions
from tidegate.transport.limits import check_frame_size
from tidegate.transport.messages import EndSessions, Message, encode

Sent = list[tuple[str, Message]]


def sessions_of(*keepers: str) -> tuple[OpenSessions, Sent]:
    sent: Sent = []
    sessions = OpenSessions(lambda engine, message: sent.append((engine, message)))
    for name in keepers:
        sessions.joined(name, replace(hello(name), supports_sessions=True))
    return sessions, sent


async def test_the_engine_of_a_rollouts_last_turn_gets_one_message_of_its_end() -> None:
    sessions, sent = sessions_of("a", "b")
    one, other = Rollout(4, 0, 0), Rollout(5, 0, 1)
    for session in (5, 5, 6):
        sessions.submitted("a", session)

    for rollout in (one, other, one):
        sessions.rollout_ended(rollout)
    await asyncio.sleep(0)

    assert sent == [("a", EndSessions(sessions=[5, 6]))]


async def test_an_engine_that_a_session_has_left_gets_a_message() -> None:
    sessions, sent = sessions_of("a", "b")
    sessions.submitted("a", 1)
    sessions.submitted("b", 1)
    await asyncio.sleep(0)
    assert sent == [("a", EndSessions(sessions=[1]))]

    sessions.rollout_ended(Rollout(0, 0, 0))
    await asyncio.sleep(0)
    assert sent[1:] == [("b", EndSessions(sessions=[1]))]


async def test_engines_without_anything_kept_get_no_message() -> None:
    sessions, sent = sessions_of("a", "b", "c")
    sessions.joined("plain", hello("plain"))
    for number, engine in enumerate(("plain", "a", "b", "c"), 1):
        sessions.submitted(engine, number)
    sessions.left("a")
    sessions.joined("b", hello("b"))  # another process, of another kind
    for number in range(3):
        sessions.rollout_ended(Rollout(number, 0, 0))
    await asyncio.sleep(0)
    sessions.rollout_ended(Rollout(3, 0, 0))
    sessions.close()
    await asyncio.sleep(0)

    assert sent == []


async def test_many_sessions_that_end_at_once_are_reported_in_frames_of_bounded_size() -> None:
    sessions, sent = sessions_of("a")
    count = SESSIONS_PER_MESSAGE + 1
    for number in range(count):
        sessions.submitted("a", 2**40 + number + 1)
        sessions.rollout_ended(Rollout(2**40 + number, 0, 0))
    await asyncio.sleep(0)

    reported: list[int] = []
    for _, message in sent:
        assert isinstance(message, EndSessions)
        check_frame_size(encode(message))
        reported += message.sessions
    assert sorted(reported) == [2**40 + number + 1 for number in range(count)]
    assert len(sent) == 2
