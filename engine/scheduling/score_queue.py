"""Scoring requests: log-probs, hidden states, embeddings and rewards of given tokens.

To the running set a request is a sequence that samples nothing: it is ranked, chunked and preempted
like a sequence, and shares the blocks that it computes. Positions to be scored are never taken from
the prefix cache. All values of an answer are from one weight version, so a swap restarts every
request. Nothing is computed here; the runner scores rows.
"""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import numpy.typing as npt

from tidegate.engine.execution.runner import Row
from tidegate.engine.execution.step_layout import AdapterVersion
from tidegate.engine.sampling.scoring import (
    Reads,
    RowScore,
    RowScoring,
    ScoringCapabilities,
    join_scores,
)
from tidegate.engine.scheduling.sequence_queues import SequenceQueues
from tidegate.engine.scheduling.sequences import (
    PART_OF_WEIGHTS,
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
"""Limit of requests held at a time. Tidegate's orchestrator has at most half as many as sequences
may be in flight."""

READS: dict[ScoreKind, Reads] = {
    "logprobs": "logprobs",
    "embedding": "hidden_states",
    "mean_embedding": "sum",
    "hidden_states": "hidden_states",
    "rewards": "rewards",
}
"""The model output that a row reads, for each kind of request."""

_FLOAT32_BYTES = 4


class ScoreState(EngineSequence):
    """One scoring request: its tokens, its KV, and the values computed so far."""

    __slots__ = ("_message", "chunks", "first_position", "next_position", "score_kind")

    is_score = True

    def __init__(
        self, message: ScoreTokens, tokens: npt.NDArray[np.int32], arrival: int, *, end: int
    ) -> None:
        """Only positions before ``end`` are computed."""
        submitted = SubmitTurn(
            turn=message.request_id,
            token_ids=b"",
            sampling=SamplingParams(max_tokens=0, adapter=message.adapter),
            priority=message.priority,
        )
        super().__init__(submitted, tokens, arrival)
        self.length = end
        self.score_kind = message.score_kind
        self._message = message
        self.first_position = end - 1
        """First position whose hidden state is needed."""
        if message.score_kind == "logprobs":
            self.first_position = message.start - 1  # its logits score the token after it
        elif message.score_kind in ("mean_embedding", "hidden_states"):
            self.first_position = message.start
        self.next_position = self.first_position
        """First position whose values have not been computed yet."""
        self.chunks: list[RowScore] = []
        """Values of the positions from ``first_position`` to ``next_position``, one entry per
        chunk."""

    @property
    def reusable_tokens(self) -> int:
        """Number of leading positions that may come from the prefix cache."""
        return self.next_position

    def restart(self) -> None:
        """Discard the values computed so far."""
        self.chunks.clear()
        self.next_position = self.first_position

    def next_row(self) -> Row:
        """Return the request's row in the planned step."""
        row, start = self.row, self.computed
        end = start + self.chunk_tokens
        row.start = start
        row.token_ids = self.tokens[start:end]
        row.scoring = None
        positions = end - max(start, self.next_position)
        if positions > 0:
            following = self.tokens[end - positions + 1 : end + 1]
            row.scoring = RowScoring(
                positions=positions,
                reads=READS[self.score_kind],
                token_ids=following if self.score_kind == "logprobs" else following[:0],
                top_logprobs=self._message.top_logprobs,
                temperature=self._message.temperature,
            )
        return row

    def messages(self, version: int) -> list[Message]:
        """Return all values, split into messages that fit a frame.

        Raises:
            ScoreRefused: a value is not finite.
        """
        scores = join_scores(self.chunks)
        _refuse_non_finite(scores, version)
        if self.score_kind == "logprobs":
            return list(self._logprobs(scores, version))
        values = _column(scores.values)
        if self.score_kind == "mean_embedding":
            values = values.sum(0, keepdims=True, dtype=np.float64) / (
                self.length - self.first_position
            )
        return list(self._parts(values.astype("<f4"), version))

    def _logprobs(self, scores: RowScore, version: int) -> Iterator[Message]:
        logprobs, ids, top_logprobs = _column(scores.logprobs), scores.top_ids, scores.top_logprobs
        for part in _cut(len(logprobs), _position_bytes(self._message.top_logprobs)):
            yield ScoreResult(
                request_id=self.handle,
                version=version,
                start=self._message.start + part.start,
                logprobs=logprobs[part].astype("<f4").tobytes(),
                top_ids=b"" if ids is None else ids[part].astype("<i4").tobytes(),
                top_logprobs=b""
                if top_logprobs is None
                else top_logprobs[part].astype("<f4").tobytes(),
                ranks=b"" if scores.ranks is None else scores.ranks[part].astype("<i4").tobytes(),
                is_last=part.stop >= len(logprobs),
            )

    def _parts(self, values: npt.NDArray[np.float32], version: int) -> Iterator[Message]:
        for part in _cut(len(values), values[0].nbytes):
            yield ScoreResult(
                request_id=self.handle,
                version=version,
                start=self.first_position + part.start,
                values=values[part].tobytes(),
                is_last=part.stop >= len(values),
            )


class ScoreQueue:
    """All scoring requests of one engine, by request number."""

    def __init__(
        self, limits: EngineLimits, capabilities: ScoringCapabilities, queues: SequenceQueues
    ) -> None:
        self._limits = limits
        self._capabilities = capabilities
        self._queues = queues
        self._requests: dict[int, ScoreState] = {}
        self.on_ended: Callable[[ScoreState], None] = lambda state: None
        """Called with each request that is answered or forgotten."""

    def submit(
        self, message: ScoreTokens, arrival: int, adapter_version: int = PART_OF_WEIGHTS
    ) -> None:
        """Queue a scoring request.

        ``adapter_version``: version of its adapter, if the adapter has versions of its own.

        Raises:
            ScoreRefused: it can never be answered as asked.
        """
        if message.request_id in self._requests or len(self._requests) >= REQUESTS_MAX:
            raise ScoreRefused(
                f"score request {message.request_id} refused: its number is in use, or the engine "
                f"holds its limit of {REQUESTS_MAX} score requests; wait for replies"
            )
        state = admit_score(message, self._limits, self._capabilities, arrival)
        state.use_version(adapter_version)
        self._requests[state.handle] = state
        self._queues.queue(state)

    def refuse_turns(self) -> None:
        """Refuse a sequence if the model has no LM head.

        Raises:
            TurnRefused: the model ends in a classification head.
        """
        if not self._capabilities.generates:
            raise TurnRefused(
                f"this engine's model ends in a classification head of {self._capabilities.labels} "
                f"labels, and generates no tokens; request rewards or embeddings"
            )

    @property
    def generates(self) -> bool:
        """Whether tokens can be sampled from the model."""
        return self._capabilities.generates

    def cancel(self, request: int) -> None:
        """Forget a request. Unknown numbers are ignored, because the request may just have been
        answered."""
        state = self._requests.pop(request, None)
        if state is not None:
            self._queues.remove(state)
            self.on_ended(state)

    def clear(self) -> None:
        """Forget all requests."""
        for request in list(self._requests):
            self.cancel(request)

    def refuse_without(self, adapters: Collection[str], version: int) -> list[Message]:
        """Drop the requests whose adapter is not among ``adapters``; return their answers."""
        refused = [
            s
            for s in self._requests.values()
            if s.adapter and s.adapter_version == PART_OF_WEIGHTS and s.adapter not in adapters
        ]
        for state in refused:
            self.cancel(state.handle)
        return [
            scoring.ScoreFailed(
                request_id=state.handle, message=no_adapter(state.adapter, version, adapters)
            )
            for state in refused
        ]

    def refuse(self, is_meant: Callable[[AdapterVersion], bool], reason: str) -> list[Message]:
        """Drop the requests whose adapter version ``is_meant``; return their answers. Adapters that
        are part of the weights have no version."""
        refused = [
            state
            for state in self._requests.values()
            if (adapter := state.own_version) is not None and is_meant(adapter)
        ]
        for state in refused:
            self.cancel(state.handle)
        return [scoring.ScoreFailed(request_id=s.handle, message=reason) for s in refused]

    def restart(self) -> None:
        """Restart all requests, because other weights are live."""
        for state in self._requests.values():
            state.restart()
            if state.is_running:
                self._queues.preempt(state)

    def take(
        self, sequence: EngineSequence, scores: Iterator[RowScore], version: int
    ) -> list[Message]:
        """Add a computed chunk to its request; return the answer if it was the last chunk."""
        assert isinstance(sequence, ScoreState)  # as ``is_score`` says
        if sequence.row.scoring is not None:
            sequence.chunks.append(next(scores))
            sequence.next_position = sequence.computed
        if sequence.computed < sequence.length:
            return []
        self.cancel(sequence.handle)
        try:
            return sequence.messages(version)
        except ScoreRefused as error:
            return [scoring.ScoreFailed(request_id=sequence.handle, message=str(error))]


def no_adapter(adapter: str, version: int, adapters: Collection[str]) -> str:
    """Return why a sequence is refused whose adapter the live weights lack."""
    names = sorted(adapters) or "none"
    return f"v{version} has no adapter {adapter!r}, it has {names}; publish it first"


def admit_score(
    message: ScoreTokens, limits: EngineLimits, capabilities: ScoringCapabilities, arrival: int
) -> ScoreState:
    """Validate a request and make its state.

    Raises:
        ScoreRefused: it can never be answered as asked.
    """
    if message.score_kind not in capabilities.score_kinds:
        supported = ", ".join(capabilities.score_kinds) or "nothing"
        raise ScoreRefused(
            f"this engine's model computes {supported}, and {message.score_kind} was requested; "
            "request one of these, or serve a model with the right head"
        )
    try:
        tokens = read_token_ids(message.token_ids, limits)
    except TurnRefused as error:
        raise ScoreRefused(str(error)) from error
    if capabilities.image_token_id is not None and capabilities.image_token_id in tokens:
        raise ScoreRefused("scoring reads no images; score tokens without their placeholders")
    _check_numbers(message, len(tokens), limits)
    end = len(tokens)
    if message.score_kind == "logprobs":
        end -= 1  # no token follows the last one
    elif message.score_kind == "rewards":
        end = _rewarded_token(tokens, capabilities.pad_token_id) + 1
    blocks = limits.blocks_for(end)
    if blocks > limits.num_blocks:
        no_blocks = OutOfBlocks(
            blocks_needed=blocks, blocks_total=limits.num_blocks, block_tokens=limits.block_tokens
        )
        raise ScoreRefused(str(no_blocks)) from no_blocks
    _check_size(message, end, capabilities)
    return ScoreState(message, tokens, arrival, end=end)


def _check_numbers(message: ScoreTokens, tokens: int, limits: EngineLimits) -> None:
    if tokens > limits.context_tokens_max:
        raise ScoreRefused(
            f"{tokens} tokens are more than the model's context of {limits.context_tokens_max}; "
            "score shorter sequences"
        )
    first = 1 if message.score_kind == "logprobs" else 0
    if tokens <= first:
        raise ScoreRefused("a single token has no log-prob, because no token precedes it; send two")
    if not first <= message.start < tokens and message.score_kind not in ("embedding", "rewards"):
        raise ScoreRefused(
            f"start must be in [{first}, {tokens - 1}] for {message.score_kind} of {tokens} "
            f"tokens, got {message.start}"
            + ("; the first token has no log-prob, because no token precedes it" if first else "")
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
    """Return the answer's bytes per position: a log-prob and, if top log-probs are requested, these
    and a rank."""
    return _FLOAT32_BYTES * (2 + 2 * top_logprobs if top_logprobs else 1)


def _check_size(message: ScoreTokens, end: int, capabilities: ScoringCapabilities) -> None:
    scores = end - message.start
    answer_bytes = 0
    if message.score_kind == "logprobs":
        answer_bytes = (scores + 1) * _position_bytes(message.top_logprobs)
    elif message.score_kind == "hidden_states":
        answer_bytes = scores * _FLOAT32_BYTES * capabilities.hidden_size
    if answer_bytes > ANSWER_BYTES_MAX:
        raise ScoreRefused(
            f"the requested {message.score_kind} are {answer_bytes} bytes, and the limit of an "
            f"answer is {ANSWER_BYTES_MAX}; raise start, lower top_logprobs, or score shorter "
            "sequences"
        )


def _rewarded_token(tokens: npt.NDArray[np.int32], pad_token_id: int | None) -> int:
    """Return the position that a classification head reads: the last token that is not padding, as
    in transformers; 0 if all are padding."""
    if pad_token_id is None:
        return len(tokens) - 1
    unpadded = np.flatnonzero(tokens != pad_token_id)
    return int(unpadded[-1]) if unpadded.size else 0


def _cut(rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of ``rows`` that fit a frame."""
    step = max(1, PART_BYTES_MAX // row_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _refuse_non_finite(scores: RowScore, version: int) -> None:
    for values in (scores.logprobs, scores.values):
        if values is not None and not np.isfinite(values).all():
            raise ScoreRefused(
                f"weights v{version} compute NaN or infinity for these tokens; publish "
                f"finite weights"
            )


def _column(values: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    assert values is not None  # set, because it was requested
    return values
