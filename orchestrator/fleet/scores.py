"""Requests to score token sequences, and their results: log-probs, embeddings and rewards.

``Rollouts.score``, ``embed`` and ``reward`` and the :class:`Episode` methods make
:class:`ScoreQuery` objects here;
:class:`~tidegate.orchestrator.fleet.score_dispatcher.ScoreDispatcher` sends the requests. Letters
in shapes: N tokens of a sequence, k likeliest tokens, H hidden, L labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, ScoreRefused
from tidegate.transport.attachments import Attachment, AttachmentName
from tidegate.transport.scoring import TOP_LOGPROBS_MAX, ScoreKind, ScoreResult, ScoreTokens

TOKENS_MAX = 2**21
"""Longest sequence, in tokens: 8 MiB of ids, which fit a frame."""

LOGPROB_MAX = 1e-3
"""Largest accepted log-prob: rounding may put a probability above 1."""

Pooling = Literal["last", "mean", "none"]
"""Hidden states that make an embedding: the last token's, their mean, or all of them."""

Floats = npt.NDArray[np.float32]

_SCORE_KINDS: dict[Pooling, ScoreKind] = {
    "last": "embedding",
    "mean": "mean_embedding",
    "none": "hidden_states",
}


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probability of each token of a sequence, given the tokens before it."""

    version: int
    """Weight version that computed all values."""
    engine: str
    """Name of the engine that computed the scores."""
    start: int
    """Position in the sequence of the first log-prob."""
    logprobs: Floats
    """[N - start], natural log."""
    top_ids: npt.NDArray[np.int32]
    """[N - start, k], likeliest first."""
    top_logprobs: Floats
    """Natural-log probabilities of the likeliest tokens at each position, [N - start, k]."""
    ranks: npt.NDArray[np.int32] | None = None
    """[N - start]: rank of each token, 1 for the likeliest; None without ``top_logprobs``, or if
    the engine doesn't report it."""

    def part(self, start: int, tokens: int) -> "TokenScores":
        """Return the scores of the ``tokens`` tokens from position ``start`` on."""
        chosen = slice(start - self.start, start - self.start + tokens)
        return replace(
            self,
            start=start,
            logprobs=self.logprobs[chosen],
            top_ids=self.top_ids[chosen],
            top_logprobs=self.top_logprobs[chosen],
            ranks=None if self.ranks is None else self.ranks[chosen],
        )

    def attachments(self, turn: int) -> list[Attachment]:
        """Return the scores as ``teacher_…`` attachments of a turn whose tokens these are."""
        columns: dict[AttachmentName, npt.NDArray[Any]] = {"teacher_logprobs": self.logprobs}
        if self.top_ids.size:
            columns["teacher_top_ids"] = self.top_ids
            columns["teacher_top_logprobs"] = self.top_logprobs
        return [Attachment.of(turn, name, 0, values) for name, values in columns.items()]


@dataclass(frozen=True, slots=True)
class Readout:
    """Output of a model for a sequence: an embedding, or rewards."""

    version: int
    """Weight version that computed all values."""
    engine: str
    """Name of the engine that computed the output."""
    values: Floats
    """[H] for an embedding; [N - start, H] for all hidden states; [L] for rewards."""


Score = TokenScores | Readout


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """One sequence and the scores to compute for it, before a request number is assigned."""

    token_ids: bytes
    score_kind: ScoreKind
    start: int = 0
    top_logprobs: int = 0
    temperature: float = 1.0
    adapter: str = ""
    """LoRA adapter to compute with; empty for none."""
    adapter_version: int | None = None
    """For an adapter with versions of its own: a version, or 0 for the live one."""

    @property
    def tokens(self) -> int:
        """N, the length of the sequence."""
        return len(self.token_ids) // 4

    def message(self, request_id: int) -> ScoreTokens:
        """Return the request's wire message."""
        return ScoreTokens(
            request_id=request_id,
            token_ids=self.token_ids,
            score_kind=self.score_kind,
            start=self.start,
            top_logprobs=self.top_logprobs,
            temperature=self.temperature,
            adapter=self.adapter,
            adapter_version=self.adapter_version,
        )


def logprob_queries(
    sequences: Sequence[Any],
    start: int | Sequence[int],
    top_logprobs: int,
    temperature: float,
) -> list[ScoreQuery]:
    """Check the arguments of ``score`` and make its requests.

    Raises:
        ConfigError: an argument has no valid value.
    """
    top = _integer("top_logprobs", top_logprobs)
    if not 0 <= top <= TOP_LOGPROBS_MAX:
        raise ConfigError(f"top_logprobs must be in [0, {TOP_LOGPROBS_MAX}], got {top}")
    try:
        scale = float(temperature)
    except (TypeError, ValueError):
        raise ConfigError(f"temperature must be a number, got {temperature!r:.100}") from None
    columns = _columns(sequences)
    starts = _starts(start, len(columns), least=1)
    return [
        ScoreQuery(column, "logprobs", first, top, scale)
        for column, first in zip(columns, starts, strict=True)
    ]


def embedding_queries(
    sequences: Sequence[Any], pooling: Pooling, start: int | Sequence[int]
) -> list[ScoreQuery]:
    """Check the arguments of ``embed`` and make its requests.

    Raises:
        ConfigError: an argument has no valid value.
    """
    if pooling not in _SCORE_KINDS:
        raise ConfigError(f"pooling must be 'last', 'mean' or 'none', got {pooling!r}")
    columns = _columns(sequences)
    starts = _starts(start, len(columns), least=0)
    return [
        ScoreQuery(column, _SCORE_KINDS[pooling], first)
        for column, first in zip(columns, starts, strict=True)
    ]


def reward_queries(sequences: Sequence[Any]) -> list[ScoreQuery]:
    """Check the arguments of ``reward`` and make its requests.

    Raises:
        ConfigError: a sequence is not a list of token ids.
    """
    return [ScoreQuery(column, "rewards") for column in _columns(sequences)]


def assemble_score(engine: str, query: ScoreQuery, parts: Sequence[ScoreResult]) -> Score:
    """Assemble the parts of an engine's reply to a query.

    Raises:
        ScoreRefused: the parts don't fit the query.
    """
    rows, k = query.tokens - query.start, query.top_logprobs
    version = parts[0].version
    logprobs = _floats(engine, [part.logprobs for part in parts])
    values = _floats(engine, [part.values for part in parts])
    top_logprobs = _floats(engine, [part.top_logprobs for part in parts])
    top_ids = _integers(engine, [part.top_ids for part in parts])
    if any(part.version != version for part in parts):
        raise _defect(engine, f"of versions {sorted({part.version for part in parts})}")
    if query.score_kind != "logprobs":
        if not values.size or (query.score_kind == "hidden_states" and values.size % rows):
            raise _defect(engine, f"{values.size} values for {rows} positions")
        is_matrix = query.score_kind == "hidden_states"
        return Readout(version, engine, values.reshape(rows, -1) if is_matrix else values)
    if (logprobs.size, top_ids.size, top_logprobs.size) != (rows, rows * k, rows * k):
        raise _defect(engine, f"{logprobs.size} log-probs for {rows} tokens")
    ranks = _integers(engine, [part.ranks for part in parts])
    if ranks.size not in (0, rows) or not (ranks > 0).all():
        raise _defect(engine, f"{ranks.size} ranks for {rows} tokens, or some below 1")
    if not (logprobs <= LOGPROB_MAX).all():
        raise _defect(engine, "a log-prob that is NaN or above 0")
    return TokenScores(
        version,
        engine,
        query.start,
        logprobs,
        top_ids.reshape(rows, k),
        top_logprobs.reshape(rows, k),
        ranks if ranks.size else None,
    )


def _floats(engine: str, columns: Sequence[bytes]) -> Floats:
    column = b"".join(columns)
    if len(column) % 4:
        raise _defect(engine, f"{len(column)} bytes of float32")
    return np.frombuffer(column, "<f4").astype(np.float32)


def _integers(engine: str, columns: Sequence[bytes]) -> npt.NDArray[np.int32]:
    column = b"".join(columns)
    if len(column) % 4:
        raise _defect(engine, f"{len(column)} bytes of int32")
    return np.frombuffer(column, "<i4").astype(np.int32)


def _defect(engine: str, problem: str) -> ScoreRefused:
    return ScoreRefused(f"engine {engine!r} replied with {problem}; this is a bug of the engine")


def _columns(sequences: Any) -> list[bytes]:
    try:
        lists = list(sequences)
    except TypeError:
        raise ConfigError(
            f"sequences must be several lists of token ids, got {type(sequences).__name__}"
        ) from None
    return [_column(token_ids) for token_ids in lists]


def _column(token_ids: Any) -> bytes:
    """Return a sequence's ids in wire form; lists, arrays and tensors are accepted."""
    if isinstance(token_ids, str):
        raise ConfigError("a sequence is a list of token ids, got text; encode it first")
    column = np.asarray(token_ids)
    if not column.size:
        raise ConfigError("a sequence to score is empty; omit it, or start it with a token")
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ConfigError(
            f"a sequence is a list of token ids, got {column.dtype} of shape {list(column.shape)}"
        )
    if column.size > TOKENS_MAX or column.min() < 0 or column.max() >= 2**31:
        raise ConfigError(
            f"a sequence has at most {TOKENS_MAX} ids in [0, 2**31), got {column.size} in "
            f"[{column.min()}, {column.max()}]"
        )
    return column.astype("<i4").tobytes()


def _starts(start: Any, sequences: int, *, least: int) -> list[int]:
    if np.ndim(start):
        starts = [_integer("start", position) for position in start]
    else:
        starts = [_integer("start", start)] * sequences
    if len(starts) != sequences:
        raise ConfigError(
            f"start must be one position, or one for each of {sequences} sequences, got "
            f"{len(starts)}"
        )
    wrong = [position for position in starts if not least <= position <= TOKENS_MAX]
    if wrong:
        raise ConfigError(f"start must be in [{least}, {TOKENS_MAX}], got {wrong[0]}")
    return starts


def _integer(name: str, value: Any) -> int:
    """Return an int; numpy's and torch's are accepted, bools are not."""
    try:
        if not isinstance(value, bool | np.bool_):
            return index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} must be a whole number, got {value!r:.100}")
