"""How does an event become a record, and how does a core live through it again?

A core is its events: fed the same ones, it is in the same state. Tasks are not written down, for
they are the user's and come again from the user's iterator; all else is. What an episode added to
its context since its last turn travels with the event that tells of it.
"""

from typing import Any

import msgspec

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.transport.messages import Prefill, TokenDetails

KINDS: tuple[type[msgspec.Struct], ...] = (
    ev.StepArrived,
    ev.TurnAsked,
    ev.TurnGivenUp,
    ev.EpisodeReturned,
    ev.EpisodeFailed,
    ev.TaskArrived,
    ev.TaskFound,
    ev.TasksOffered,
    ev.TasksExhausted,
    ev.EvaluationAsked,
    ev.EngineJoined,
    ev.EngineLeft,
    ev.EngineSwapped,
    ev.TurnRejected,
    ev.BatchAsked,
    ev.BatchNotWanted,
    ev.VersionPublished,
    ev.BatchesSafe,
    ev.RolloutCut,
    ev.Resumed,
    ev.RunEnded,
    ev.StateNoted,
    ev.OffPolicynessMeasured,
    ev.VersionRetracted,
    ev.RolloutForked,
    ev.TurnsRewarded,
    ev.RowsDiscarded,
)
"""An event's number in a record is its place here: add at the end, remove none."""

NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
FIELDS = {kind: [name for name in kind.__struct_fields__ if name != "task"] for kind in KINDS}
"""What is written of each: not tasks."""

GIVES = (ev.TurnAsked, ev.EpisodeReturned, ev.EpisodeFailed)
"""Events of a rollout whose episode may have added to its context."""


class TaskElsewhere:
    """Stands for a task that a journal knows only by its place."""

    def __repr__(self) -> str:
        return "TASK_ELSEWHERE"


TASK_ELSEWHERE = TaskElsewhere()

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Any])


def encode_event(event: ev.Event, core: Core) -> bytes:
    """One record; to be made before ``core`` has handled the event."""
    kind = type(event)
    if isinstance(event, ev.StepArrived):
        return _encoder.encode(_step_record(event))
    values = [getattr(event, name) for name in FIELDS[kind]]
    if isinstance(event, GIVES):
        rollout = core.rollout(event.rollout_id)
        values.append(rollout.token_ids[rollout.sampled_end :].tobytes() if rollout else b"")
    return _encoder.encode([NUMBERS[kind], *values])


def _step_record(event: ev.StepArrived) -> list[Any]:
    """Without when it began: that only a picture of the run is made of."""
    details = [event.details] if event.details else []
    return [
        0,
        event.engine,
        event.version,
        event.turns.tobytes(),
        event.token_ids.tobytes(),
        event.logprobs.tobytes(),
        event.finish,
        event.counts.tobytes() if event.counts is not None else None,
        event.prefills,
        event.epoch,
        event.seq,
        event.busy_us,
        *details,
    ]


def replay(record: bytes, core: Core) -> tuple[ev.Event, list[ev.Command]]:
    """Have ``core`` live through a record; the event, and what it answered.

    Raises:
        ValueError: the record is none of this version's.
    """
    try:
        number, *values = _decoder.decode(record)
        kind = KINDS[number]
        event = _step(values) if number == 0 else _event(kind, values)
    except (msgspec.MsgspecError, IndexError, TypeError) as error:
        raise ValueError(f"a record of {len(record)} bytes can't be read: {error}") from error
    if isinstance(event, GIVES) and (rollout := core.rollout(event.rollout_id)) is not None:
        rollout.cut(turns=len(rollout.turns), tokens=rollout.sampled_end)
        rollout.extend(memoryview(values[-1]).cast("i").tolist())
    return event, core.handle(event)


def _event(kind: type[Any], values: list[Any]) -> Any:
    told = values[:-1] if kind in GIVES else values  # the last is what was added
    fields = dict(zip(FIELDS[kind], told, strict=False))
    if kind in (ev.TaskArrived, ev.TaskFound, ev.EvaluationAsked):
        fields["task"] = TASK_ELSEWHERE
    return msgspec.convert(fields, kind)


def _step(values: list[Any]) -> ev.StepArrived:
    engine, version, turns, token_ids, logprobs, finish, counts, prefills, epoch, seq, *rest = (
        values
    )
    return ev.StepArrived(
        engine=engine,
        version=version,
        turns=memoryview(turns).cast("I"),
        token_ids=memoryview(token_ids).cast("i"),
        logprobs=memoryview(logprobs).cast("f"),
        finish=finish,
        counts=memoryview(counts).cast("I") if counts is not None else None,
        prefills=msgspec.convert(prefills, list[Prefill]),
        epoch=epoch,
        seq=seq,
        busy_us=rest[0] if rest else 0,
        details=msgspec.convert(rest[1], list[TokenDetails]) if rest[1:] else (),
    )
