"""Codec of the journal's records: events to bytes, and bytes to events that a core handles again.

The journal stores the records; a resume and a replay feed them to a new core, which then has the
same state. A task is written if it is plain data; other tasks come from the user's iterator again.
An event's record includes the tokens that the episode appended since its last turn. The encoding is
MessagePack.
"""

from typing import Any, get_args

import msgspec

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.transport.messages import Attachment, Prefill
from tidegate.transport.sampling import SamplingParams

KINDS: tuple[type[msgspec.Struct], ...] = get_args(ev.Event)
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
FIELDS = {kind: [name for name in kind.__struct_fields__ if name != "task"] for kind in KINDS}
"""Fields of each kind that are written, in order. Of a task, only ``body`` is written."""

APPENDING_EVENTS = (ev.TurnRequested, ev.EpisodeReturned, ev.EpisodeFailed)
"""Events whose record ends with the tokens that the episode appended since its last turn."""


class TaskElsewhere:
    """Placeholder for a task without a body in the journal: only the user's iterator has it."""

    def __repr__(self) -> str:
        return "TASK_ELSEWHERE"


TASK_ELSEWHERE = TaskElsewhere()

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Any])

TASK_BYTES_MAX = 64 * 1024
"""Largest task that is written, in bytes: a long prompt, about as much as its group's tokens."""

TASK_DEPTH_MAX = 16
"""Nesting limit of a task that is written."""

TUPLE_CODE = 1
"""MessagePack extension type of a tuple, which would come back as a list."""


def task_body(task: object) -> bytes:
    """Return a task as bytes for :func:`task_of`; empty if the task is not plain data.

    Plain data are None, bools, numbers, strings, bytes, and lists, tuples and dicts of plain data.
    An object of any other class could only be restored by importing its class.
    """
    try:
        body = msgspec.msgpack.encode(_plain(task, 0), order="deterministic")
    except (TypeError, ValueError, OverflowError):
        return b""
    return body if len(body) <= TASK_BYTES_MAX else b""


def task_of(body: bytes) -> object:
    """Return the task that :func:`task_body` encoded; :data:`TASK_ELSEWHERE` for an empty body.

    Raises:
        ValueError: the bytes are not an encoded task.
    """
    if not body:
        return TASK_ELSEWHERE
    return msgspec.msgpack.decode(body, ext_hook=_tuple)


def _plain(value: object, depth: int) -> object:
    kind = type(value)
    if kind in (bool, int, float, str, bytes) or value is None:
        return value
    if depth < TASK_DEPTH_MAX:
        if kind is dict:
            return {_key(k): _plain(v, depth + 1) for k, v in value.items()}  # type: ignore[attr-defined]
        if kind is list:
            return [_plain(item, depth + 1) for item in value]  # type: ignore[attr-defined]
        if kind is tuple:
            parts = [_plain(item, depth + 1) for item in value]  # type: ignore[attr-defined]
            data = msgspec.msgpack.encode(parts, order="deterministic")
            return msgspec.msgpack.Ext(TUPLE_CODE, data)
    raise TypeError(
        f"{kind.__name__} is not plain data: None, bool, int, float, str, bytes, list, tuple or "
        "dict"
    )


def _key(key: object) -> object:
    if type(key) is not str:
        raise TypeError(
            f"a dict key of type {type(key).__name__} may be restored as another type; use str keys"
        )
    return key


def _tuple(code: int, data: memoryview) -> object:
    if code != TUPLE_CODE:
        raise ValueError(
            f"a journalled task has MessagePack extension type {code}, and only {TUPLE_CODE} "
            "(tuples) is written; is the journal of a newer version?"
        )
    return tuple(msgspec.msgpack.decode(data, type=list[Any], ext_hook=_tuple))


def encode_event(event: ev.Event, core: Core) -> bytes:
    """Return the record of an event. Call it before ``core`` has handled the event."""
    kind = type(event)
    if isinstance(event, ev.StepArrived):
        return _encoder.encode(_step_record(event))
    if isinstance(event, ev.ForAdapter):
        inner = encode_event(event.event, core)
        return _encoder.encode([NUMBERS[kind], event.adapter, inner])
    values = [getattr(event, name) for name in FIELDS[kind]]
    if isinstance(event, APPENDING_EVENTS):
        rollout = core.rollout(event.rollout_id)
        values.append(rollout.token_ids[rollout.sampled_end :].tobytes() if rollout else b"")
    return _encoder.encode([NUMBERS[kind], *values])


def _step_record(event: ev.StepArrived) -> list[Any]:
    """Return a step's record, without ``started_us``, which only traces use."""
    attachments = [event.attachments] if event.attachments or event.adapter else []
    adapter = [event.adapter] if event.adapter else []
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
        *attachments,
        *adapter,
    ]


def replay(record: bytes, core: Core) -> tuple[ev.Event, list[ev.Command]]:
    """Decode a record, let ``core`` handle its event, and return the event with the core's
    commands.

    Raises:
        ValueError: the record is not of this version.
    """
    try:
        event, values = _decoded(record)
    except (msgspec.MsgspecError, IndexError, TypeError) as error:
        raise ValueError(f"a record of {len(record)} bytes can't be read: {error}") from error
    if (
        isinstance(event, APPENDING_EVENTS)
        and (rollout := core.rollout(event.rollout_id)) is not None
    ):
        rollout.extend(memoryview(values[-1]).cast("i").tolist())
    return event, core.handle(event)


def _decoded(record: bytes) -> tuple[ev.Event, list[Any]]:
    """Return a record's event, and the values that it was made from."""
    number, *values = _decoder.decode(record)
    kind = KINDS[number]
    if kind is ev.ForAdapter:
        adapter, inner = values
        event, _ = _decoded(inner)
        return ev.ForAdapter(adapter, event), values
    return (_step(values) if number == 0 else _event(kind, values)), values


def _event(kind: type[Any], values: list[Any]) -> Any:
    # The last value of an appending event is the appended tokens.
    given = values[:-1] if kind in APPENDING_EVENTS else values
    fields = dict(zip(FIELDS[kind], given, strict=False))
    if kind is ev.TaskArrived:
        fields["task"] = task_of(fields.get("body", b""))
    elif kind in (ev.TaskFoundAgain, ev.EvaluationRequested):
        fields["task"] = TASK_ELSEWHERE
    elif kind is ev.TurnRequested:
        fields["sampling"] = SamplingParams.from_record(fields["sampling"])
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
        attachments=msgspec.convert(rest[1], list[Attachment]) if rest[1:] else (),
        adapter=rest[2] if rest[2:] else "",
    )
