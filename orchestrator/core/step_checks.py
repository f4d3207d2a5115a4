"""Validation of one step message: columns, token ids, log-probs, prefills and attachments.

The fleet checks every step before the core sees it, and refuses impossible numbers from a faulty
engine as :class:`BadFrame`. A check compares a step with the engine's vocabulary and the newest
version, but not with earlier steps: :class:`TurnTracker` knows which turns exist or have ended.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from tidegate.errors import BadFrame
from tidegate.orchestrator.core.events import StepArrived
from tidegate.transport.attachments import ATTACHMENTS, ITEM_BYTES, Attachment
from tidegate.transport.messages import CANCELLED, Prefill, Step

LOGPROB_MAX = 1e-3
"""Largest accepted log-prob: rounding in half precision may put a probability above 1."""

LOGPROB_MIN = -1e9
"""Smallest accepted log-prob of a sampled token. Even a masked-out token has no lower one."""

Buffer: TypeAlias = bytes | memoryview

STEPS_REMEMBERED = 2048
"""Number of cached results of :func:`_are_different`, enough for a thousand engines: most steps
have the same turns as their engine's previous step. Without the cache, ``benchmarks.transport
tokens`` receives .92 of the tokens per CPU-second at 1,000 steps a second, and .94 at full speed
(medians of 5 pairs)."""

_FINISH_CODES = bytes(range(CANCELLED + 1))

_highest = np.maximum.reduce
_lowest = np.minimum.reduce


def step_arrived(engine: str, step: Step, epoch: int = 0) -> StepArrived:
    """Unpack a step's columns.

    Raises:
        BadFrame: their lengths don't agree.
    """
    try:
        turns = memoryview(step.turns).cast("I")
        token_ids = memoryview(step.token_ids).cast("i")
        logprobs = memoryview(step.logprobs).cast("f")
        counts = memoryview(step.counts).cast("I") if step.counts else None
    except (TypeError, struct.error) as error:
        raise BadFrame(f"step {step.seq}: a column is no whole number of items: {error}") from error
    tokens = len(turns) if counts is None else sum(counts.tolist())
    rows = {len(turns), len(step.finish) or len(turns), len(turns if counts is None else counts)}
    if len(rows) > 1 or not len(token_ids) == len(logprobs) == tokens:
        raise BadFrame(
            f"step {step.seq}: {len(turns)} turns, {tokens} tokens announced, but "
            f"{len(token_ids)} ids, {len(logprobs)} log-probs and {len(step.finish)} finish flags"
        )
    return StepArrived(
        engine=engine,
        version=step.version,
        turns=turns,
        token_ids=token_ids,
        logprobs=logprobs,
        finish=step.finish,
        counts=counts,
        prefills=step.prefills,
        epoch=epoch,
        seq=step.seq,
        started_us=step.started_us,
        busy_us=step.busy_us,
        attachments=step.attachments,
        adapter=step.adapter,
    )


def are_tokens_valid(steps: Sequence[Step], vocab_size: int) -> bool:
    """Whether every id and log-prob in all of these steps is in range.

    False means that the steps must be checked one by one. One numpy call over many steps takes as
    long as over one: without it, ``benchmarks.transport tokens`` receives 0.95 of the tokens per
    CPU-second at 1,000 steps a second, and 0.74 at full speed (medians of 5 pairs).
    """
    if len(steps) < 2 or not all(_has_aligned_columns(step) for step in steps):
        return False
    token_ids = b"".join([step.token_ids for step in steps])
    if not token_ids:
        return False
    logprobs = b"".join([step.logprobs for step in steps])
    return _are_valid(token_ids, logprobs, vocab_size) == (True, True)


def _has_aligned_columns(step: Step) -> bool:
    """Whether both columns have the same number of whole 4-byte values, so that the columns of
    several steps can be concatenated and still match value by value."""
    nbytes = len(step.token_ids)
    return nbytes == len(step.logprobs) and not nbytes % 4


def check_step(
    step: StepArrived, *, vocab_size: int, newest_version: int, has_valid_tokens: bool = False
) -> None:
    """Refuse values out of range, and a turn with two rows.

    ``has_valid_tokens``: :func:`are_tokens_valid` has found the step's tokens valid.

    Raises:
        BadFrame: names the value and its position.
    """
    if step.version > newest_version:
        raise BadFrame(
            f"step {step.seq} was sampled by {_weights(step)} v{step.version}, but "
            f"v{newest_version} are the newest published"
        )
    if step.finish.translate(None, _FINISH_CODES):
        raise BadFrame(
            f"step {step.seq}: finish codes are 0 to {CANCELLED}, got {max(step.finish)}"
        )
    if not has_valid_tokens and len(step.token_ids):
        _check_tokens(step, vocab_size)
    if not _are_different(step.turns.tobytes()):
        raise BadFrame(f"step {step.seq}: a turn has more than one row")
    if step.attachments:
        _check_attachments(step, step.turns.tolist(), vocab_size)
    if step.prefills:
        handles = step.turns.tolist()
        counts = [1] * len(handles) if step.counts is None else step.counts.tolist()
        tokens = dict(zip(handles, counts, strict=True))
        for prefill in step.prefills:
            _check_prefill(step, prefill, tokens.pop(prefill.turn, 0), newest_version)


def _weights(step: StepArrived) -> str:
    return f"adapter {step.adapter!r}" if step.adapter else "weights"


@lru_cache(maxsize=STEPS_REMEMBERED)
def _are_different(turns: bytes) -> bool:
    handles = memoryview(turns).cast("I").tolist()
    return len(set(handles)) == len(handles)


def _check_tokens(step: StepArrived, vocab_size: int) -> None:
    are_ids, are_logprobs = _are_valid(step.token_ids, step.logprobs.cast("B"), vocab_size)
    if not are_ids:
        at = next(i for i, token in enumerate(step.token_ids) if not 0 <= token < vocab_size)
        raise BadFrame(
            f"step {step.seq}: token_ids[{at}] is {step.token_ids[at]}, outside of the vocabulary "
            f"[0, {vocab_size})"
        )
    if not are_logprobs:
        at = next(
            i for i, value in enumerate(step.logprobs) if not LOGPROB_MIN <= value <= LOGPROB_MAX
        )
        raise BadFrame(
            f"step {step.seq}: logprobs[{at}] is {step.logprobs[at]}, no logarithm of a "
            f"probability; did the model compute NaN?"
        )


def _are_valid(token_ids: Buffer, logprobs: Buffer, vocab_size: int) -> tuple[bool, bool]:
    """Return whether all ids, and whether all log-probs, are in range; neither may be empty."""
    # As unsigned, negative ids are the largest, so one maximum finds both.
    are_ids = bool(_highest(np.frombuffer(token_ids, np.uint32)) < vocab_size)
    column = np.frombuffer(logprobs, np.float32)  # NaN fails any comparison
    return are_ids, bool(_lowest(column) >= LOGPROB_MIN and _highest(column) <= LOGPROB_MAX)


def _check_attachments(step: StepArrived, handles: list[int], vocab_size: int) -> None:
    """Refuse attachments of other turns, second ones, and wrong types, lengths or values."""
    turns = set(handles)
    seen: set[tuple[int, str]] = set()
    for attachment in step.attachments:
        key = (attachment.turn, attachment.name)
        if attachment.turn not in turns or key in seen:
            raise BadFrame(
                f"step {step.seq}: {attachment.name} of turn {attachment.turn}, which has no row "
                f"in it, or a second time"
            )
        seen.add(key)
        if why := _layout_fault(attachment) or _value_fault(attachment, vocab_size):
            raise BadFrame(f"step {step.seq}: {attachment.name} of turn {attachment.turn} {why}")


def _layout_fault(attachment: Attachment) -> str:
    """Return what is wrong with an attachment's dtype, shape or sizes; empty if nothing is."""
    kind, nbytes = ATTACHMENTS[attachment.name], len(attachment.values)
    if kind.is_added:
        return "are added by the orchestrator, and engines report none"
    if attachment.dtype not in kind.dtypes:
        return f"are {' or '.join(kind.dtypes)}, got {attachment.dtype}"
    if len(attachment.shape) != kind.dimensions or not all(attachment.shape):
        return f"have entries of {kind.dimensions} dimensions, got shape {attachment.shape}"
    if kind.is_ragged:
        if len(attachment.counts) % 4:
            return f"have counts of {len(attachment.counts)} bytes, no whole number of uint32"
        values = int(np.frombuffer(attachment.counts, np.uint32).sum(dtype=np.uint64))
        if nbytes != values * ITEM_BYTES[attachment.dtype]:
            return f"have {nbytes} bytes of values, but counts for {values} values"
    elif attachment.counts:
        return f"have entries of one size, but {len(attachment.counts)} bytes of counts"
    elif nbytes % attachment.entry_bytes:
        return f"have {nbytes} bytes, no whole number of entries of {attachment.entry_bytes}"
    return ""


def _value_fault(attachment: Attachment, vocab_size: int) -> str:
    """Return what is wrong with an attachment's values; empty if nothing is.

    A top token's log-prob may be -inf, because sampling options may have excluded it.
    """
    if not attachment.values:
        return ""
    values = np.frombuffer(attachment.values, attachment.dtype)
    if attachment.dtype == "int32" and _highest(values.view(np.uint32)) >= vocab_size:
        return f"hold a token outside of the vocabulary [0, {vocab_size})"
    if attachment.dtype == "float32" and not ATTACHMENTS[attachment.name].is_logprob:
        return "" if np.isfinite(values).all() else "hold NaN or infinity"
    if attachment.dtype == "float32" and not (
        np.all(values <= LOGPROB_MAX)
        and (attachment.name == "top_logprobs" or np.all(values >= LOGPROB_MIN))
    ):
        return "hold a value that is no logarithm of a probability; did the model compute NaN?"
    return ""


def _check_prefill(step: StepArrived, prefill: Prefill, tokens: int, newest_version: int) -> None:
    """Refuse a prefill of a turn without tokens, a second prefill, and spans with gaps."""
    if not tokens:
        raise BadFrame(
            f"step {step.seq}: a prefill of turn {prefill.turn}, which has no token in it, or a "
            f"second prefill"
        )
    end = 0
    for span in prefill.spans:
        if span.start != end or span.end <= span.start or span.version > newest_version:
            raise BadFrame(f"step {step.seq}: turn {prefill.turn} can't have been prefilled {span}")
        end = span.end
    if end <= prefill.output_tokens:
        raise BadFrame(
            f"step {step.seq}: turn {prefill.turn} was prefilled over {end} positions, after "
            f"{prefill.output_tokens} tokens of output and a prompt"
        )
    if prefill.cached_tokens >= end:
        raise BadFrame(
            f"step {step.seq}: turn {prefill.turn} reports {prefill.cached_tokens} of its {end} "
            f"positions as cached, but the last position is always computed"
        )
