"""Step runner for models that only transformers implements.

Implements ``Runner`` with the same blocks as
:class:`~tidegate.engine.execution.runner.ModelRunner`. Rows with equally many tokens run in one
forward pass, padded on the left as ``transformers``' ``generate`` does. A probe at start finds
models that pad in another way; their rows run one by one.

Letters in shapes: R rows, T a row's tokens, H hidden size, V vocabulary.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.execution.block_cache import (
    EMPTY,
    KEYS_AND_VALUES,
    STATES,
    SUPPORTED_MODELS_HINT,
    BlockMemory,
    OpenBlocks,
    PassRow,
    cache_argument,
    declared_layers,
    parameters_of,
)
from tidegate.engine.execution.images import RowImage, positions
from tidegate.engine.execution.position_cache import PositionCache
from tidegate.engine.execution.runner import Row, with_positions
from tidegate.engine.models.fallback_weights import FallbackWeights
from tidegate.engine.sampling.sampling import (
    RowSampling,
    StepOutput,
    hidden_rows,
    sample_rows,
    with_hidden_states,
)
from tidegate.engine.sampling.scoring import (
    RowScore,
    RowScoring,
    in_pieces,
    join_scores,
    score_hidden,
    score_logits,
)
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ModelError
from tidegate.policies.routing_replay import mixture_layers, record_routed_experts
from tidegate.transport.images import ImageReader

PROBE_TOKENS = 64
"""Tokens of the context that the probe reads: whole, and in :data:`PROBE_CHUNKS` and one by one."""

PROBE_CHUNKS = (7, 1, 4)
PROBE_BLOCK_TOKENS = 4

PROBE_DIFFERENCE_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Limit, by dtype, of the mean difference of log-probs over the vocabulary, at any position, when a
context is read in chunks. Chunks only add in another order; other states change log-probs more."""

PADDED_POSITIONS_FREE = 4096
"""Positions of one forward pass up to which padding does not matter, because the layers' overhead
outweighs it."""

FEATURE_TOKENS_KEPT = 16_384
"""Tokens of images whose features are kept for later chunks and rows: 128 MiB at a width of 2,048
in float32."""

NEVER_SAMPLED = -1e30
"""Logit of a token with probability 0, finite because infinity times 0 is NaN."""


@dataclass(slots=True)
class _Chunk:
    """Tokens that one forward pass computes for a row."""

    row: int
    tokens: npt.NDArray[np.int32]
    context: PassRow
    samples: bool
    """Whether a token is sampled after the chunk's last one."""
    scoring: RowScoring | None
    records_experts: bool
    reports_hidden: bool
    """Whether the row's hidden state is reported with its token."""
    images: Sequence[RowImage]
    """Images of the row's whole context."""


class FallbackRunner:
    """Runs one transformers model on one thread."""

    def __init__(
        self,
        weights: FallbackWeights,
        *,
        num_blocks: int,
        block_tokens: int,
        is_batched: bool = True,
        images: ImageReader | None = None,
    ) -> None:
        """Without ``is_batched`` each forward pass computes one row. ``images`` is None if the
        model reads none."""
        self.weights = weights
        """Replaced between two steps only, by weights of the same model and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._memory = BlockMemory(weights.module, num_blocks, block_tokens)
        self._is_batched = is_batched
        self._images = images
        self._features: OrderedDict[str, torch.Tensor] = OrderedDict()
        """Features [tokens, H] of images by digest, of the live weights."""
        mixtures = () if refused_options(weights.module) else mixture_layers(weights.module)
        num_experts = max((layer.num_experts for layer in mixtures), default=0)
        self._experts = PositionCache(num_blocks, block_tokens, num_experts - 1)

    def swap(self, weights: WeightStore) -> None:
        """Use other weights of the same model from the next step on."""
        if not isinstance(weights, FallbackWeights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights
        self._features.clear()

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the KV cache and of the recurrent states."""
        return self._memory.tensors()

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run the rows; sample after rows with ``sampling``, score rows with ``scoring``."""
        logits: dict[int, torch.Tensor] = {}
        scores: dict[int, RowScore] = {}
        hidden: dict[int, torch.Tensor] = {}
        for batch in self._batches(rows):
            first = batch[0]
            if first.scoring is not None:
                scores[first.row] = self._score(first, first.scoring)
                continue
            with _capture_head_inputs(self.weights.module, is_on=first.reports_hidden) as inputs:
                computed = self._forward(batch)
            for number, chunk in enumerate(batch):
                if chunk.samples:
                    logits[chunk.row] = computed[number, -1].float()
                    if first.reports_hidden:
                        hidden[chunk.row] = inputs[0][number, -1].float()
        row_scores = [scores[number] for number in sorted(scores)]
        if not logits:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32), scores=row_scores)
        sampling: list[RowSampling] = [row.sampling for row in rows if row.sampling is not None]
        output = sample_rows(torch.stack([logits[number] for number in sorted(logits)]), sampling)
        if hidden:
            states = torch.stack([hidden[row] for row in sorted(hidden)])
            output = with_hidden_states(output, hidden_rows(sampling), states)
        output = with_positions(output, "routed_experts", self._experts, rows)
        return replace(output, scores=row_scores)

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[_Chunk]]:
        """Yield the step's forward passes, in an order in which each row's past is computed.

        A row may continue from blocks that earlier rows of the step fill.
        """
        waves: defaultdict[int, list[_Chunk]] = defaultdict(list)
        written: dict[int, int] = {}
        """Last wave that writes each block, of the blocks that this step writes."""
        for chunk in self._chunks(rows):
            context, block_tokens = chunk.context, self.block_tokens
            blocks = context.block_table[: -(-context.end // block_tokens)]
            wave = 1 + max((written.get(block, -1) for block in blocks), default=-1)
            for block in blocks[context.start // block_tokens :]:
                written[block] = wave
            waves[wave].append(chunk)
        for wave in sorted(waves):
            yield from self._batches_of(waves[wave])

    def _chunks(self, rows: Sequence[Row]) -> Iterator[_Chunk]:
        """Cut the rows where a forward pass must end: with states, at the end of each block."""
        for number, row in enumerate(rows):
            end = row.start + len(row.token_ids)
            ends = [end]
            if self._memory.has_states and row.scoring is None:
                ends = self._state_ends(row.start, end)
            start = row.start
            for chunk_end in ends:
                yield _Chunk(
                    number,
                    row.token_ids[start - row.start : chunk_end - row.start],
                    PassRow(row.block_table, start, chunk_end),
                    row.sampling is not None and chunk_end == end,
                    row.scoring,
                    row.positions_from is not None,
                    row.sampling is not None and bool(hidden_rows([row.sampling])),
                    row.images,
                )
                start = chunk_end

    def _state_ends(self, start: int, end: int) -> list[int]:
        """Return the ends of the blocks in ``(start, end)``, and ``end``."""
        first = (start // self.block_tokens + 1) * self.block_tokens
        return [*range(first, end, self.block_tokens), end]

    def _batches_of(self, wave: list[_Chunk]) -> Iterator[list[_Chunk]]:
        """Yield the forward passes of chunks that do not depend on each other."""
        kinds: defaultdict[tuple[object, ...], list[_Chunk]] = defaultdict(list)
        for chunk in wave:
            alone = chunk.row if chunk.scoring is not None or not self._is_batched else -1
            starts = self._memory.has_states and not chunk.context.start
            reports = chunk.records_experts, chunk.reports_hidden
            kinds[len(chunk.tokens), starts, *reports, alone].append(chunk)
        for chunks in kinds.values():
            chunks.sort(key=lambda chunk: chunk.context.end)
            batch: list[_Chunk] = []
            positions = 0
            for chunk in chunks:
                end = chunk.context.end
                padded = (len(batch) + 1) * end
                if batch and padded > PADDED_POSITIONS_FREE and padded > 2 * (positions + end):
                    yield batch
                    batch, positions = [], 0
                batch.append(chunk)
                positions += end
            yield batch

    def _forward(self, batch: Sequence[_Chunk], *, last_tokens: int = 1) -> torch.Tensor:
        """Run one forward pass; return the logits [R, last_tokens, V]."""
        if not batch[0].records_experts:
            return self._logits(batch, last_tokens)[0]
        with record_routed_experts(self.weights.module) as recorder:
            logits, slots = self._logits(batch, last_tokens)
        self._experts.write(slots.numpy(), recorder.routed_experts().numpy())
        return logits

    def _logits(
        self, batch: Sequence[_Chunk], last_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [R, last_tokens, V], and the slots [R * T] of the new tokens."""
        logits, slots = _read(
            self.weights.module,
            self._memory,
            [chunk.tokens for chunk in batch],
            [chunk.context for chunk in batch],
            last_tokens=last_tokens,
            is_batched=self._is_batched,
            inputs=self._image_inputs(batch) if any(chunk.images for chunk in batch) else {},
        )
        if self._images is not None:
            # A sampled placeholder would be a token that trainers take for an image's.
            logits[..., self._images.placeholder_id] = NEVER_SAMPLED
        return logits, slots

    def _image_inputs(self, batch: Sequence[_Chunk]) -> dict[str, torch.Tensor]:
        """Return embeddings [R, T, H], with images in place of their placeholders, and rotary
        positions [3, R, T]."""
        token_ids = torch.from_numpy(np.stack([chunk.tokens for chunk in batch]).astype(np.int64))
        embeddings = self.weights.module.get_input_embeddings()(token_ids)
        places = []
        for row, chunk in zip(embeddings, batch, strict=True):
            first, end = chunk.context.start, chunk.context.end
            places.append(positions(chunk.images, first, end))
            for image in chunk.images:
                start, stop = max(image.start, first), min(image.end, end)
                if start < stop:
                    features = self._features_of(image)[start - image.start : stop - image.start]
                    row[start - first : stop - first] = features
        return {"inputs_embeds": embeddings, "position_ids": torch.stack(places, 1)}

    def _features_of(self, image: RowImage) -> torch.Tensor:
        """Return the live weights' features [tokens, H] of an image."""
        digest = image.image.digest
        if (features := self._features.get(digest)) is None:
            assert self._images is not None
            inputs = self._images.process(image.media, image.image)
            vision = self.weights.module.get_image_features(
                torch.from_numpy(inputs.pixel_values), torch.from_numpy(inputs.grid[None])
            )
            features = self._features[digest] = torch.cat(tuple(vision.pooler_output))
            while sum(map(len, self._features.values())) > FEATURE_TOKENS_KEPT:
                if len(self._features) == 1:
                    break
                self._features.popitem(last=False)
        self._features.move_to_end(digest)
        return features

    def _score(self, chunk: _Chunk, scoring: RowScoring) -> RowScore:
        """Score a row's last positions in pieces, to bound the memory of their logits."""
        module, end = self.weights.module, len(chunk.tokens)
        first = end - scoring.positions
        self._read_part(chunk, 0, first)
        pieces = []
        for part, piece in in_pieces(scoring, module.config.get_text_config().vocab_size):
            start, stop = first + part.start, first + part.stop
            if scoring.reads == "logprobs":
                pieces.append(score_logits(torch.cat(self._read_part(chunk, start, stop)), piece))
                continue
            with _capture_head_inputs(module, is_on=True) as hidden:
                self._read_part(chunk, start, stop)
            states = torch.cat([inputs[0] for inputs in hidden])
            pieces.append(score_hidden(states[-piece.positions :], piece))
        return join_scores(pieces)

    def _read_part(self, chunk: _Chunk, start: int, stop: int) -> list[torch.Tensor]:
        """Run a row's tokens ``[start, stop)`` alone; return their logits, [T, V] per pass."""
        if start == stop:
            return []
        context = chunk.context
        ends = [context.start + stop]
        if self._memory.has_states:
            ends = self._state_ends(context.start + start, context.start + stop)
        logits = []
        for end in ends:
            tokens = chunk.tokens[start : end - context.start]
            part = replace(
                chunk,
                tokens=tokens,
                context=PassRow(context.block_table, context.start + start, end),
            )
            logits.append(self._forward([part], last_tokens=len(tokens))[0].float())
            start = end - context.start
        return logits


def refused_options(module: Any) -> Mapping[str, str]:
    """Return the options for attachments that a model cannot make, each with the reason."""
    try:
        mixture_layers(module)
    except ModelError as error:
        return {"routed_experts": str(error)}
    return {}


@dataclass(frozen=True, slots=True)
class Probed:
    """Properties of a model, as measured by a forward pass in chunks."""

    token_bytes: int
    """Bytes of one position's keys and values in all layers."""
    state_bytes: int
    """Bytes of the recurrent states after one position; 0 without any."""
    is_batched: bool
    """Whether rows padded on the left get the same log-probs as alone."""


@torch.inference_mode()
def probe(module: Any, vocab_size: int, *, context_tokens_max: int = PROBE_TOKENS) -> Probed:
    """Check that keys, values and states in blocks are the model's whole state, by reading one
    context in chunks and token by token.

    Raises:
        ModelError: chunks change the log-probs, or the model does not expose its state.
    """
    name = type(module).__name__
    _refuse_layers(module)
    tokens = max(sum(PROBE_CHUNKS), min(PROBE_TOKENS, context_tokens_max))
    token_ids = np.arange(tokens, dtype=np.int32) % vocab_size
    blocks = -(-tokens // PROBE_BLOCK_TOKENS)
    chunks = (*PROBE_CHUNKS, *[1] * (tokens - sum(PROBE_CHUNKS)))
    order = torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(0)).tolist()
    try:
        memory = BlockMemory(module, 3 * blocks, PROBE_BLOCK_TOKENS)
        whole = _read_context(module, BlockMemory(module, 1, tokens), token_ids, [0])
        chunked = _read_context(module, memory, token_ids, order[:blocks], chunks)
    except ModelError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{name} can't be run from keys and values alone: {reason}. {SUPPORTED_MODELS_HINT}"
        ) from error
    limit = PROBE_DIFFERENCE_MAX[module.dtype]
    difference = _difference(whole, chunked)
    if not difference <= limit:
        raise ModelError(
            f"{name} keeps more state of a context than its cache in transformers: log-probs "
            f"differ by {difference:.2g} on average if the context is read token by token. "
            f"{SUPPORTED_MODELS_HINT}"
        )
    return Probed(
        memory.token_bytes(),
        memory.state_bytes(),
        _pads_on_the_left(module, memory, token_ids, order[blocks:], limit),
    )


def _pads_on_the_left(
    module: Any,
    memory: BlockMemory,
    token_ids: npt.NDArray[np.int32],
    blocks: Sequence[int],
    limit: float,
) -> bool:
    """Return whether two rows of unequal contexts get the same log-probs together as alone."""
    short, shorter = PROBE_CHUNKS[0], PROBE_CHUNKS[2]
    half = len(blocks) // 2
    tables = [blocks[:half], blocks[half:]]
    alone = []
    for table, past in zip(tables, (short, shorter), strict=True):
        _read_context(module, memory, token_ids, table, (past,))
        alone.append(_read_context(module, memory, token_ids, table, (past, 1, 1))[-1:])
        _read_context(module, memory, token_ids, table, (past,))
    try:
        for number in range(2):
            together, _ = _read(
                module,
                memory,
                [token_ids[past + number :][:1] for past in (short, shorter)],
                [
                    PassRow(table, past + number, past + number + 1)
                    for table, past in zip(tables, (short, shorter), strict=True)
                ],
                last_tokens=1,
                is_batched=True,
            )
    except Exception:  # noqa: BLE001  (its rows can run one by one)
        return False
    return all(
        _difference(logits, row[-1:].float()) <= limit
        for logits, row in zip(alone, together, strict=True)
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean difference of log-probs over the vocabulary, at the worst position. [T, V]"""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean(-1).max())


def _read_context(
    module: Any,
    memory: BlockMemory,
    token_ids: npt.NDArray[np.int32],
    table: Sequence[int],
    chunks: Sequence[int] | None = None,
) -> torch.Tensor:
    """Read a context in chunks, cut at the ends of blocks; return the logits [T, V]."""
    start = 0
    logits = []
    for tokens in chunks or (len(token_ids),):
        end = start + tokens
        while start < end:
            stop = min(end, (start // memory.block_tokens + 1) * memory.block_tokens)
            row = PassRow(table, start, stop)
            tokens_read = [token_ids[start:stop]]
            read, _ = _read(
                module, memory, tokens_read, [row], last_tokens=stop - start, is_batched=False
            )
            logits.append(read[0].float())
            start = stop
    return torch.cat(logits)


def _refuse_layers(module: Any) -> None:
    """Refuse a model for which transformers declares other cache layers than keys, values and
    states.

    Raises:
        ModelError: it has such layers.
    """
    known = (*KEYS_AND_VALUES, *STATES, *EMPTY)
    layers = declared_layers(module.config)
    other_layers = [layer for layer in layers if type(layer).__name__ not in known]
    if not other_layers:
        return
    cache_kinds = sorted({type(layer).__name__ for layer in other_layers})
    raise ModelError(
        f"{type(module).__name__} can't be run from keys, values and states alone; "
        f"{len(other_layers)} of its {len(layers)} layers keep a {' or a '.join(cache_kinds)} of "
        f"transformers. {SUPPORTED_MODELS_HINT}"
    )


def _read(
    module: Any,
    memory: BlockMemory,
    tokens: Sequence[npt.NDArray[np.int32]],
    rows: Sequence[PassRow],
    *,
    last_tokens: int,
    is_batched: bool,
    inputs: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens [T] of each row after its cached ones, and cache their keys, values and states.

    ``inputs``: arguments of the forward pass in place of token ids and positions.
    Return the logits [R, last_tokens, V] of the rows' last tokens, and the slots [R * T] of all.
    """
    opened = OpenBlocks(memory, rows)
    parameters = parameters_of(module.__class__)
    if not inputs:
        inputs = {"input_ids": torch.from_numpy(np.stack(tokens).astype(np.int64))}
        if is_batched and "position_ids" in parameters:  # else computed from the attention mask
            inputs |= {"position_ids": opened.position_ids}
    if "logits_to_keep" in parameters:  # those of a whole long prompt would take gigabytes
        inputs = {**inputs, "logits_to_keep": last_tokens}
    output = module(
        **inputs,
        attention_mask=opened.attention_mask,
        use_cache=True,
        **cache_argument(module, opened.cache),
    )
    opened.store_states()
    logits: torch.Tensor = output.logits[:, -last_tokens:]
    return logits, opened.new_slots


@contextmanager
def _capture_head_inputs(module: Any, *, is_on: bool) -> Iterator[list[torch.Tensor]]:
    """Collect the inputs of the LM head, one tensor [R, T, H] per forward pass, if ``is_on``."""
    inputs: list[torch.Tensor] = []
    if not is_on:
        yield inputs
        return
    head = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield inputs
    finally:
        hook.remove()
