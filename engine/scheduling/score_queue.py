"""Scoring requests: log-probs, hidden states, embeddings and rewards of given tokens.

Used by the scheduler. To the running set a request is a turn that samples nothing: it is ranked,
chunked and preempted like a turn, and shares the blocks that it computes. Positions to be scored
are never taken from the prefix cache. All values of an answer are from one weight version, so a
swap restarts every request. Nothing is computed here; the runner scores rows.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tidegate.engine.execution.runner import Row
from tidegate.engine.sampling.scoring import (
    Reads,
    RowScore,
    RowScoring,
    ScoringCapabilities,
    join_scores,
)
from tidegate.engine.scheduling.sequence_queues import SequenceQueues
from tidegate.engine.scheduling.sequences import (
    TEMPERATURE_MAX,
    EngineLimits,
    EngineSequence,
    read_token_ids,
)
from tidegate.errors import OutOfBlocks, ScoreRefused, TurnRefused
from tidegate.transport import scoring
from tidegate.transport.messages import Message, SamplingParams, SubmitTurn
from tidegate.transport.scoring import (
    ANSWER_BYTES_MAX,
    PART_BYTES_MAX,
    TOP_LOGPROBS_MAX,
    ScoreKind,
    ScoreResult,
    ScoreTokens,
)

REQUESTS_MAX = 4096
"""Limit of requests held at a time. Tidegate's orchestrator has at most half as many as turns
may be in flight."""

READS: dict[ScoreKind, Reads] = {
    "logprobs": "logprobs",
    "embedding": "hidden_states",
    "mean_embedding": "sum",
    "hidden_states": "hidden_states",
    "rewards": "rewards",
}
"""What a row reads from the model, for each kind of request."""

_NO_TOKENS = SamplingParams(max_tokens=0)

_FLOAT32_BYTES = 4


class ScoreState(EngineSequence):
    """One scoring request: its tokens, its KV, and the values computed so far."""

    __slots__ = ("_asked", "chunks", "first_told", "needed_from", "want")

    is_score = True

    def __init__(
        self, message: ScoreTokens, tokens: npt.NDArray[np.int32], arrival: int, *, end: int
    ) -> None:
        """Only positions before ``end`` are computed."""
        turn = SubmitTurn(
            turn=message.request_id, token_ids=b"", sampling=_NO_TOKENS, priority=message.priority
        )
        super().__init__(turn, tokens, arrival)
        self.length = end
        self.want = message.score_kind
        self._asked = message
        self.first_told = end - 1
        """First position whose hidden state is needed."""
        if message.score_kind == "logprobs":
            self.first_told = message.start - 1  # its logits score the token after it
        elif message.score_kind in ("mean_embedding", "hidden_states"):
            self.first_told = message.start
        self.needed_from = self.first_told
        """First position whose values have not been computed yet."""
        self.chunks: list[RowScore] = []
        """Values of the positions from ``first_told`` to ``needed_from``, one entry per chunk."""

    @property
    def reusable_tokens(self) -> int:
        """Number of leading positions that may come from the prefix cache."""
        return self.needed_from

    def begin_again(self) -> None:
        """Discard the values computed so far."""
        self.chunks.clear()
        self.needed_from = self.first_told

    def next_row(self) -> Row:
        """Return the request's row in the planned step."""
        row, start = self.row, self.computed
        end = start + self.chunk_tokens
        row.start = start
        row.token_ids = self.tokens[start:end]
        row.scoring = None
        positions = end - max(start, self.needed_from)
        if positions > 0:
            following = self.tokens[end - positions + 1 : end + 1]
            row.scoring = RowScoring(
                positions=positions,
                reads=READS[self.want],
                token_ids=following if self.want == "logprobs" else following[:0],
                top_logprobs=self._asked.top_logprobs,
                temperature=self._asked.temperature,
            )
        return row

    def answer(self, version: int) -> list[Message]:
        """Return all values, split into messages that fit a frame.

        Raises:
            ScoreRefused: a value is not finite.
        """
        told = join_scores(self.chunks)
        _refuse_nan(told, version)
        if self.want == "logprobs":
            return list(self._logprobs(told, version))
        values = _column(told.values)
        if self.want == "mean_embedding":
            values = values.sum(0, keepdims=True, dtype=np.float64) / (
                self.length - self.first_told
            )
        return list(self._parts(values.astype("<f4"), version))

    def _logprobs(self, told: RowScore, version: int) -> Iterator[Message]:
        logprobs, ids, likeliest = _column(told.logprobs), told.top_ids, told.top_logprobs
        for part in _cut(len(logprobs), _position_bytes(self._asked.top_logprobs)):
            yield ScoreResult(
                request_id=self.handle,
                version=version,
                start=self._asked.start + part.start,
                logprobs=logprobs[part].astype("<f4").tobytes(),
                top_ids=b"" if ids is None else ids[part].astype("<i4").tobytes(),
                top_logprobs=b"" if likeliest is None else likeliest[part].astype("<f4").tobytes(),
                ranks=b"" if told.ranks is None else told.ranks[part].astype("<i4").tobytes(),
                is_last=part.stop >= len(logprobs),
            )

    def _parts(self, values: npt.NDArray[np.float32], version: int) -> Iterator[Message]:
        for part in _cut(len(values), values[0].nbytes):
            yield ScoreResult(
                request_id=self.handle,
                version=version,
                start=self.first_told + part.start,
                values=values[part].tobytes(),
                is_last=part.stop >= len(values),
            )


class ScoreQueue:
    """All scoring requests of one engine, by request number."""

    def __init__(
        self, limits: EngineLimits, traits: ScoringCapabilities, seats: SequenceQueues
    ) -> None:
        self._limits = limits
        self._traits = traits
        self._seats = seats
        self._requests: dict[int, ScoreState] = {}

    def ask(self, message: ScoreTokens, arrival: int) -> None:
        """Queue a request.

        Raises:
            ScoreRefused: it can never be answered as asked.
        """
        if message.request_id in self._requests or len(self._requests) >= REQUESTS_MAX:
            raise ScoreRefused(
                f"request {message.request_id} is one too many: its number is in use, or there are "
                f"{REQUESTS_MAX} of others, which is all that an engine holds"
            )
        state = admit_score(message, self._limits, self._traits, arrival)
        self._requests[state.handle] = state
        self._seats.queue(state)

    def refuse_turns(self) -> None:
        """Refuse a turn if the model has no LM head.

        Raises:
            TurnRefused: the model ends in a classification head.
        """
        if not self._traits.generates:
            raise TurnRefused(
                f"this engine's model ends in a classification head of {self._traits.labels} "
                f"labels, and makes no tokens; ask it for rewards or embeddings"
            )

    @property
    def generates(self) -> bool:
        """Whether tokens can be sampled from the model."""
        return self._traits.generates

    def cancel(self, request: int) -> None:
        """Forget a request; unknown ones are ignored, as it may just have been answered."""
        state = self._requests.pop(request, None)
        if state is not None:
            self._seats.remove(state)

    def clear(self) -> None:
        """Forget all requests."""
        for request in list(self._requests):
            self.cancel(request)

    def begin_again(self) -> None:
        """Restart all requests, because other weights are live."""
        for state in self._requests.values():
            state.begin_again()
            if state.is_running:
                self._seats.send_back(state)

    def take(self, turn: EngineSequence, scores: Iterator[RowScore], version: int) -> list[Message]:
        """Add a computed chunk to its request; return the answer if it was the last chunk."""
        assert isinstance(turn, ScoreState)  # as ``is_score`` says
        if turn.row.scoring is not None:
            turn.chunks.append(next(scores))
            turn.needed_from = turn.computed
        if turn.computed < turn.length:
            return []
        self.cancel(turn.handle)
        try:
            return turn.answer(version)
        except ScoreRefused as error:
            return [scoring.ScoreFailed(request_id=turn.handle, message=str(error))]


def admit_score(
    message: ScoreTokens, limits: EngineLimits, traits: ScoringCapabilities, arrival: int
) -> ScoreState:
    """Validate a request and make its state.

    Raises:
        ScoreRefused: it can never be answered as asked.
    """
    if message.score_kind not in traits.wants:
        can = ", ".join(traits.wants) or "nothing"
        raise ScoreRefused(f"this engine tells {can} of given tokens, but not {message.score_kind}")
    try:
        tokens = read_token_ids(message.token_ids, limits)
    except TurnRefused as error:
        raise ScoreRefused(str(error)) from error
    _check_numbers(message, len(tokens), limits)
    end = len(tokens)
    if message.score_kind == "logprobs":
        end -= 1  # no token follows the last one
    elif message.score_kind == "rewards":
        end = _judged_token(tokens, traits.pad_token_id) + 1
    blocks = limits.blocks_for(end)
    if blocks > limits.num_blocks:
        lacking = OutOfBlocks(
            blocks_needed=blocks, blocks_total=limits.num_blocks, block_tokens=limits.block_tokens
        )
        raise ScoreRefused(str(lacking)) from lacking
    _check_size(message, end, traits)
    return ScoreState(message, tokens, arrival, end=end)


def _check_numbers(message: ScoreTokens, tokens: int, limits: EngineLimits) -> None:
    if tokens > limits.context_tokens_max:
        raise ScoreRefused(
            f"{tokens} tokens are more than the model's context of {limits.context_tokens_max}"
        )
    first = 1 if message.score_kind == "logprobs" else 0
    if tokens <= first:
        raise ScoreRefused("one token has no log-prob, for nothing comes before it; send two")
    if not first <= message.start < tokens and message.score_kind not in ("embedding", "rewards"):
        raise ScoreRefused(
            f"start must be in [{first}, {tokens - 1}] for {message.score_kind} of {tokens} "
            f"tokens, got {message.start}"
            + ("; nothing comes before the first token, so it has no log-prob" if first else "")
        )
    top_max = min(TOP_LOGPROBS_MAX, limits.vocab_size)
    if message.top_logprobs > top_max:
        raise ScoreRefused(f"top_logprobs must be in [0, {top_max}], got {message.top_logprobs}")
    if not 0 < message.temperature <= TEMPERATURE_MAX:
        raise ScoreRefused(
            f"temperature divides logits and must be in (0, {TEMPERATURE_MAX:g}], got "
            f"{message.temperature}"
        )


def _position_bytes(top_logprobs: int) -> int:
    """Return the answer's bytes per position: a log-prob, and with top log-probs also
    these and a rank."""
    return _FLOAT32_BYTES * (2 + 2 * top_logprobs if top_logprobs else 1)


def _check_size(message: ScoreTokens, end: int, traits: ScoringCapabilities) -> None:
    told = end - message.start
    answer_bytes = 0
    if message.score_kind == "logprobs":
        answer_bytes = (told + 1) * _position_bytes(message.top_logprobs)
    elif message.score_kind == "hidden_states":
        answer_bytes = told * _FLOAT32_BYTES * traits.hidden_size
    if answer_bytes > ANSWER_BYTES_MAX:
        raise ScoreRefused(
            f"the {message.score_kind} asked for are {answer_bytes} bytes, and an answer may have "
            f"{ANSWER_BYTES_MAX}; raise start, lower top_logprobs, or score shorter sequences"
        )


def _judged_token(tokens: npt.NDArray[np.int32], pad_token_id: int | None) -> int:
    """Return the position that a classification head reads: the last token that is not padding, as
    in transformers; 0 if all are padding."""
    if pad_token_id is None:
        return len(tokens) - 1
    others = np.flatnonzero(tokens != pad_token_id)
    return int(others[-1]) if others.size else 0


def _cut(rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of ``rows`` that fit a frame."""
    step = max(1, PART_BYTES_MAX // row_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _refuse_nan(told: RowScore, version: int) -> None:
    for values in (told.logprobs, told.values):
        if values is not None and not np.isfinite(values).all():
            raise ScoreRefused(
                f"weights v{version} make what is not a number (NaN, or infinite) of these tokens; "
                f"are they sound?"
            )


def _column(values: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    assert values is not None  # set, because it was requested
    return values
