"""State of one turn in an engine: tokens, KV blocks, the weight versions of its KV, sampling state.

A turn is one sequence of the engine: the unit that the scheduler and the running set work on, as a
request is in vLLM. Also refuses sequences that can never be served within the engine's limits,
before they are scheduled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.engine.execution.images import RowImage, SequenceImages
from tidegate.engine.execution.runner import Row, RowSampling
from tidegate.engine.execution.step_layout import AdapterKey, AdapterVersion
from tidegate.engine.sampling.options import OptionReader
from tidegate.errors import ConfigError, OutOfBlocks, TurnRefused
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    STOP,
    KvSpan,
    Prefill,
    SamplingParams,
    SubmitTurn,
)


class KvHistory:
    """Weight versions of one sequence's KV, as runs over its context positions.

    Only runs that a weight swap has closed are stored; later positions are the live weights'. So a
    decode step costs nothing here.
    """

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed: list[KvSpan] = []

    def spans(self, live_version: int, end: int) -> list[KvSpan]:
        """Return the runs over positions ``[0, end)``, in order and without gaps."""
        closed = self._closed
        start = closed[-1].end if closed else 0
        if end <= start:
            return closed.copy()
        if closed and closed[-1].version == live_version:
            return [*closed[:-1], KvSpan(live_version, closed[-1].start, end)]
        return [*closed, KvSpan(live_version, start, end)]

    def swap(self, old_version: int, end: int) -> None:
        """Close the run of ``old_version``: positions ``[0, end)`` are computed."""
        self._closed = self.spans(old_version, end)

    def leading(self, version: int) -> int:
        """Return how many leading positions have KV that weights ``version`` computed.

        Later positions of ``version`` do not count, because they attend to older KV before them.
        """
        first = self._closed[:1]
        return first[0].end if first and first[0].version == version else 0

    def cut(self, version: int, end: int) -> None:
        """Forget all but positions ``[0, end)``, which ``version`` computed."""
        self._closed = [KvSpan(version, 0, end)] if end else []

    def clear(self) -> None:
        """Forget all runs, because the KV has been dropped."""
        self._closed = []


HANDLE_MAX = 2**32 - 1
"""Largest turn handle: handles travel in uint32 columns."""

TEMPERATURE_MAX = 1e6
"""Largest temperature: every token is about equally likely there, and a float32 column holds it."""

TOP_K_MAX = 2**31 - 1
"""Largest ``top_k``: more than any vocabulary, and an int64 column holds it."""

PART_OF_WEIGHTS = -1
"""Adapter version of sequences without an adapter, or with one that is part of the weights."""

NEVER = 2**63
"""Context position that no sequence reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacity of one engine."""

    max_running_turns: int
    max_step_tokens: int
    """Tokens computed per step, decodes and prefill chunks together."""
    num_blocks: int
    block_tokens: int
    context_tokens_max: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_step_tokens < self.max_running_turns:
            raise ConfigError(
                f"max_step_tokens={self.max_step_tokens} is less than one token for each of "
                f"max_running_turns={self.max_running_turns}; raise it to at least that"
            )

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks that hold ``tokens`` positions."""
        return -(-tokens // self.block_tokens)


class AcceptedTokens(NamedTuple):  # a tuple, because one is made per token
    """Result of one step for one sequence."""

    tokens: int
    """Number of tokens added to the sequence."""
    finish: int
    """Finish code of the sequence; RUNNING if it continues."""


class EngineSequence:
    """One turn in the engine: its tokens, KV blocks and progress."""

    __slots__ = (
        "adapter",
        "adapter_version",
        "block_tokens_held",
        "blocks",
        "cache_salt",
        "cached_tokens",
        "chunk_tokens",
        "computed",
        "drafted",
        "handle",
        "history",
        "images",
        "is_pinned",
        "is_prefilling",
        "is_running",
        "length",
        "length_max",
        "node",
        "positions_reported",
        "prompt_tokens",
        "rank",
        "row",
        "sampled_before",
        "sampling",
        "session",
        "share_at",
        "shared_blocks",
        "stop_ids",
        "tokens",
    )

    is_score = False
    """Whether the sequence is a scoring request, which samples nothing: see ``score_queue.py``."""

    def __init__(
        self,
        message: SubmitTurn,
        prompt: npt.NDArray[np.int32],
        arrival: int,
        images: tuple[RowImage, ...] = (),
    ) -> None:
        self.handle = message.turn
        self.images = images
        """Images of the prompt, in order."""
        self.rank = (message.priority, arrival)
        """Priority, then arrival number; smaller is better, and no two sequences are equal."""
        self.adapter = message.sampling.adapter
        self.adapter_version = PART_OF_WEIGHTS
        """Version of an adapter with versions of its own."""
        self.is_pinned = False
        """Whether swaps of the adapter leave the sequence at its version."""
        self.cache_salt = message.sampling.cache_salt
        self.positions_reported = 0
        """Number of leading positions whose attachments were reported since they were computed;
        unused unless the row asks for them."""
        self.stop_ids = frozenset(message.sampling.stop_token_ids)
        self.sampled_before = message.sampled_before
        self.session = message.session
        self.prompt_tokens = len(prompt)
        self.length = len(prompt)
        """Number of known tokens: prompt, then output."""
        self.length_max = len(prompt) + message.sampling.max_tokens
        self.tokens = np.empty(self.length_max, dtype=np.int32)
        self.tokens[: self.length] = prompt
        self.is_running = False
        """Whether the sequence is in the running set and may hold blocks."""
        self.blocks: list[int] = []
        self.block_tokens_held = 0
        """Number of positions that ``blocks`` can hold."""
        self.shared_blocks = 0
        """Number of leading blocks that are or were in the prefix tree; the sequence
        never writes to them."""
        self.node = 0
        """Node of the prefix tree at which the shared blocks end."""
        self.share_at = NEVER
        """Number of computed positions at which the turn's next block is full and joins the prefix
        tree. ``NEVER`` if part of its KV is from older weights, or prefixes are not shared."""
        self.computed = 0
        """Number of leading positions whose KV is in the cache; less than ``length``."""
        self.cached_tokens = 0
        """Number of computed positions that this prefill took from the prefix cache."""
        self.chunk_tokens = 0
        """Number of positions that the planned step computes, without draft tokens."""
        self.drafted = 0
        """Number of draft tokens that the planned step verifies; they are in ``tokens``
        from ``length`` on."""
        self.is_prefilling = True
        """Whether the known tokens are being (re)computed; the next sample reports new KV spans."""
        self.history = KvHistory()
        self.sampling = _row_sampling(message.sampling)
        self.row = Row(self.tokens, 0, self.blocks, None, adapter=self.adapter_key, images=images)
        """The sequence's row, updated for each step: a new object per token would cost more
        than the update."""
        if message.sampling.requests_positions:
            self.row.positions_from = 0

    @property
    def own_version(self) -> AdapterVersion | None:
        """The sequence's version of an adapter with versions of its own, if it uses one."""
        version = self.adapter_version
        return None if version == PART_OF_WEIGHTS else (self.adapter, version)

    @property
    def adapter_key(self) -> AdapterKey:
        """Adapter that the sequence computes with."""
        return self.own_version or self.adapter

    @property
    def reports_positions(self) -> bool:
        """Whether the turn asks for an attachment by position."""
        return self.row.positions_from is not None

    def use_version(self, adapter_version: int) -> None:
        """Compute later positions with another version of the sequence's adapter."""
        self.adapter_version = adapter_version
        self.row.adapter = self.adapter_key

    @property
    def output_tokens(self) -> int:
        """Number of tokens sampled since submission."""
        return self.length - self.prompt_tokens

    @property
    def reusable_tokens(self) -> int:
        """Number of leading positions that may come from the prefix cache: all but the last, whose
        hidden state the next token is sampled from."""
        return self.length - 1

    def next_row(self) -> Row:
        """Return the sequence's row; it samples if its chunk reaches the last known token."""
        row = self.row
        start = self.computed
        end = start + self.chunk_tokens
        row.start = start
        row.token_ids = self.tokens[start:end]
        row.sampling = None
        if end == self.length:
            row.sampling = self.sampling
            self.sampling.index = self.sampled_before + end - self.prompt_tokens
        if row.positions_from is not None:
            row.positions_from = self.positions_reported
        return row

    def draft_rows(self) -> Iterator[Row]:
        """Yield one row per draft token; each row attends to the draft tokens before it."""
        first = self.sampling
        for number in range(1, self.drafted + 1):
            position = self.length + number - 1
            sampling = replace(first, index=first.index + number)
            token = self.tokens[position : position + 1]
            positions_from = position if self.reports_positions else None
            yield Row(
                token,
                position,
                self.blocks,
                sampling,
                adapter=self.adapter_key,
                positions_from=positions_from,
                images=self.images,
            )

    def accept(self, sampled: Sequence[int]) -> AcceptedTokens:
        """Add a step's samples: after the last known token, then after each draft token.

        A draft token is accepted if it equals the sampled one. The first mismatch, and the end of
        the sequence, discards the samples after it.
        """
        accepted = 0
        for token_id in sampled:
            is_draft_match = accepted < self.drafted and self.tokens[self.length] == token_id
            finish = self.append(token_id)
            self.sampling.index += 1
            accepted += 1
            if finish != RUNNING or not is_draft_match:
                break
        self.computed += accepted - 1
        self.drafted = 0
        return AcceptedTokens(accepted, finish)

    def append(self, token_id: int) -> int:
        """Add a sampled token; return the sequence's finish code."""
        self.tokens[self.length] = token_id
        self.length += 1
        if token_id in self.stop_ids:
            return STOP
        sampling = self.sampling
        if sampling.options is not None and sampling.options.append(token_id, sampling.index):
            return STOP
        return LENGTH if self.length == self.length_max else RUNNING

    def end_prefill(self, live_version: int) -> Prefill:
        """End the prefill; return the weight versions of the KV of all known tokens."""
        self.is_prefilling = False
        spans: list[KvSpan] = self.history.spans(live_version, self.length)
        return Prefill(self.handle, self.output_tokens, spans, self.cached_tokens)

    def drop_kv(self) -> list[int]:
        """Forget the KV; return the blocks that held it."""
        blocks = self.blocks.copy()
        self.blocks.clear()  # not replaced, because the row refers to it
        self.block_tokens_held = 0
        self.shared_blocks = 0
        self.share_at = NEVER
        self.computed = 0
        self.cached_tokens = 0
        self.positions_reported = 0
        self.is_prefilling = True
        self.history.clear()
        return blocks

    def drop_kv_of_others(self, version: int, block_tokens: int) -> list[int] | None:
        """Forget all KV but the leading full blocks of ``version``; return the blocks past those.

        None if there is nothing to forget. Blocks are not overwritten in place, because other
        sequences may hold them, and because a block's recurrent state is that at the block's end.
        """
        kept_positions = self.history.leading(version)
        if kept_positions == self.computed:
            self.history.cut(version, kept_positions)
            return None
        blocks_kept = kept_positions // block_tokens
        kept_positions = blocks_kept * block_tokens
        self.history.cut(version, kept_positions)
        blocks = self.blocks[blocks_kept:]
        del self.blocks[blocks_kept:]
        self.block_tokens_held = blocks_kept * block_tokens
        self.computed = self.cached_tokens = kept_positions
        self.positions_reported = min(self.positions_reported, kept_positions)
        self.is_prefilling = True
        return blocks


def admit(
    message: SubmitTurn,
    limits: EngineLimits,
    arrival: int,
    options: OptionReader,
    images: SequenceImages | None = None,
) -> EngineSequence:
    """Validate a submitted turn and make its sequence. ``images`` is None if the model reads none.

    Raises:
        TurnRefused: it can never be served as asked.
    """
    prompt = read_prompt(message, limits)
    message = fitted(message, limits)
    if message.media and images is None:
        raise TurnRefused(
            "this engine reads tokens only: no images, audio or video; serve such models by vLLM "
            "(engine_urls, docs/vllm-engine.md)"
        )
    read = () if images is None else images.read(message.media, prompt)
    sequence = EngineSequence(message, prompt, arrival, read)
    sequence.sampling.options = options.read(message, sequence.tokens)
    return sequence


def read_prompt(message: SubmitTurn, limits: EngineLimits) -> npt.NDArray[np.int32]:
    """Validate a submission's handle, tokens and sampling; return its token ids.

    Raises:
        TurnRefused: it can never be served as asked.
    """
    if not 0 <= message.turn <= HANDLE_MAX:
        raise TurnRefused(f"turn handle must be in [0, {HANDLE_MAX}], got {message.turn}")
    prompt = read_token_ids(message.token_ids, limits)
    _check_sampling(message.sampling)
    if not 0 <= message.sampled_before <= len(prompt):
        raise TurnRefused(
            f"sampled_before must be in [0, {len(prompt)}], because it counts tokens at the end of "
            f"token_ids, got {message.sampled_before}"
        )
    return prompt


def _row_sampling(params: SamplingParams) -> RowSampling:
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        index=0,
    )


def read_token_ids(column: bytes, limits: EngineLimits) -> npt.NDArray[np.int32]:
    """Decode an int32 column of token ids.

    Raises:
        TurnRefused: it is empty, misaligned, or has ids outside the vocabulary.
    """
    nbytes = len(column)
    if nbytes == 0:
        raise TurnRefused("token_ids is empty; a turn needs at least one token to continue from")
    if nbytes % 4 != 0:
        raise TurnRefused(f"token_ids must be int32, 4 bytes each, got {nbytes} bytes")
    prompt = np.frombuffer(column, dtype="<i4")
    outside = (prompt < 0) | (prompt >= limits.vocab_size)
    if outside.any():
        index = int(outside.argmax())
        raise TurnRefused(
            f"token_ids[{index}] = {prompt[index]} is outside the model's vocabulary "
            f"[0, {limits.vocab_size}); was the prompt made with another tokenizer?"
        )
    return prompt.astype(np.int32, copy=False)


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise TurnRefused(f"max_tokens must be at least 1, got {sampling.max_tokens}")
    if not 0 <= sampling.temperature <= TEMPERATURE_MAX:
        raise TurnRefused(
            f"temperature must be in [0, {TEMPERATURE_MAX:g}] (0 takes the most likely token), "
            f"got {sampling.temperature}"
        )
    if not 0 <= sampling.top_k <= TOP_K_MAX:
        raise TurnRefused(
            f"top_k must be in [0, {TOP_K_MAX}] (0 keeps all tokens), got {sampling.top_k}"
        )
    if not 0 < sampling.top_p <= 1:
        raise TurnRefused(f"top_p must be in (0, 1] (1 keeps all tokens), got {sampling.top_p}")


def fitted(message: SubmitTurn, limits: EngineLimits) -> SubmitTurn:
    """Return a submission whose ``max_tokens`` ends at the end of the model's context, or of the KV
    cache if that holds less: the turn then ends by its length, as in vLLM's server.

    Raises:
        TurnRefused: its context leaves no token to sample.
    """
    prompt_tokens = len(message.token_ids) // 4
    if prompt_tokens >= limits.context_tokens_max:
        raise TurnRefused(
            f"a context of {prompt_tokens} tokens leaves none of the model's "
            f"{limits.context_tokens_max} to sample; shorten the prompt"
        )
    # The last token sampled is never fed back, so its KV is never needed.
    kv_tokens = limits.num_blocks * limits.block_tokens
    if prompt_tokens > kv_tokens:
        raise TurnRefused(
            str(
                OutOfBlocks(
                    blocks_needed=limits.blocks_for(prompt_tokens),
                    blocks_total=limits.num_blocks,
                    block_tokens=limits.block_tokens,
                )
            )
        )
    left = min(limits.context_tokens_max, kv_tokens + 1) - prompt_tokens
    if message.sampling.max_tokens <= left:
        return message
    sampling = msgspec.structs.replace(message.sampling, max_tokens=left)
    return msgspec.structs.replace(message, sampling=sampling)
