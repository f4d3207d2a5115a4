"""What tokens come out of a step of a model that only transformers can compute? Slow, and right.

The same rows in and the same tokens out as
:class:`~tidegate.engine.execution.runner.ModelRunner`, and the same blocks: before each row its
keys and values are gathered into a cache of transformers, after it the new ones are put where its
blocks are. One row at a time, for no two models pad alike.

Letters in shapes: P past positions, T a row's tokens, K KV heads, D their width, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tidegate.engine.execution.runner import Row
from tidegate.engine.models.fallback_weights import FallbackWeights
from tidegate.engine.sampling.sampling import RowSampling, StepOutput, sample_rows
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

PROBE_TOKENS = 12
PROBE_CHUNKS = (7, 1, 4)

PROBE_DIFFERENCE_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Mean over the vocabulary of how far a log-prob may be off when a context is read in chunks. They
add in another order, no more; a model that keeps a state of its own is off by nats."""

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers of transformers' caches that hold a context's keys and values, and nothing else."""

INSTEAD = (
    "Serve a model all of whose layers are attention over the whole context or a window of it, "
    "such as a Llama, Mistral, Qwen3 or Gemma"
)
"""What ends the refusal of a model that remembers a context in another way."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys [positions, K, D] and values, whose widths may differ."""


class FallbackRunner:
    """Runs one model of transformers on one thread."""

    def __init__(self, weights: FallbackWeights, *, num_blocks: int, block_tokens: int) -> None:
        self.weights = weights
        """May be replaced between two steps, by weights of the same model and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._caches = _allocate(weights.module, num_blocks * block_tokens)

    def swap(self, weights: WeightStore) -> None:
        """Compute with others from the next step on: those of the same model."""
        if not isinstance(weights, FallbackWeights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """All that the KV is kept in, and nothing that must outlast it."""
        return [part for cache in self._caches for part in cache]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run every row's tokens, and sample after the last of those that ask for it.

        Rows to be scored sample nothing.
        """
        scores: list[RowScore] = []
        logits: list[torch.Tensor] = []
        sampling: list[RowSampling] = []
        for row in rows:
            end = row.start + len(row.token_ids)
            slots = _slots(row.block_table, end, self.block_tokens)
            if row.scoring is not None:
                scores.append(self._score(row, row.scoring, slots))
                continue
            out = _read(self.weights.module, row.token_ids, slots, self._caches)
            if row.sampling is not None:
                logits.append(out)
                sampling.append(row.sampling)
        if not sampling:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32), scores=scores)
        return replace(sample_rows(torch.stack(logits), sampling), scores=scores)

    def _score(self, row: Row, asked: RowScoring, slots: torch.Tensor) -> RowScore:
        """Read a row and score its last tokens, in pieces whose logits are not too many."""
        module, end = self.weights.module, len(row.token_ids)
        first = end - asked.positions
        if first:
            _read(module, row.token_ids[:first], slots[: row.start + first], self._caches)
        pieces = []
        for part, piece in in_pieces(asked, module.config.get_text_config().vocab_size):
            start, stop = first + part.start, first + part.stop
            tokens, where = row.token_ids[start:stop], slots[: row.start + stop]
            if asked.reads == "logprobs":
                logits = _read_all(module, tokens, where, self._caches, told=piece.positions)
                pieces.append(score_logits(logits.float(), piece))
                continue
            with _into_head(module) as hidden:
                _read_all(module, tokens, where, self._caches, told=piece.positions)
            pieces.append(score_hidden(hidden[0][-piece.positions :], piece))
        return join_scores(pieces)


def kv_token_bytes(module: Any) -> int:
    """What keys and values of one position take, in all layers."""
    return sum(part.nbytes for cache in _allocate(module, 1) for part in cache)


@torch.inference_mode()
def refuse_other_state(module: Any, vocab_size: int) -> None:
    """Try whether keys and values are all that the model remembers of a context.

    Raises:
        ModelError: it goes on differently from them, or doesn't hand them out.
    """
    name = type(module).__name__
    _refuse_layers(module)
    token_ids = np.arange(PROBE_TOKENS, dtype=np.int32) % vocab_size
    slots = torch.randperm(PROBE_TOKENS, generator=torch.Generator().manual_seed(0))
    try:
        whole = _read(module, token_ids, slots, _allocate(module, PROBE_TOKENS))
        caches = _allocate(module, PROBE_TOKENS)
        for end, chunk in zip(np.cumsum(PROBE_CHUNKS), PROBE_CHUNKS, strict=True):
            chunked = _read(module, token_ids[end - chunk : end], slots[:end], caches)
    except ModelError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{name} can't be run from keys and values alone: {why}. {INSTEAD}"
        ) from error
    difference = float((whole.log_softmax(-1) - chunked.log_softmax(-1)).abs().mean())
    if not difference <= PROBE_DIFFERENCE_MAX[module.dtype]:
        raise ModelError(
            f"{name} remembers more of a context than keys and values: log-probs are off by "
            f"{difference:.2g} on the mean when it is read in chunks. State-space and recurrent "
            f"models can't be served by this engine. {INSTEAD}"
        )


def _refuse_layers(module: Any) -> None:
    """Refuse a model of which transformers says that some layers keep more than keys and values.

    Raises:
        ModelError: it has such layers.
    """
    text = module.config.get_text_config()
    try:
        layers = transformers.DynamicCache(config=text).layers
    except Exception:  # noqa: BLE001  (a config it can't read; the probe decides then)
        return
    others = [layer for layer in layers if type(layer).__name__ not in KEYS_AND_VALUES]
    if not others:
        return
    name, kinds = type(module).__name__, getattr(text, "layer_types", None) or ()
    kept = sorted({type(layer).__name__ for layer in others})
    said = f" (layer_types: {', '.join(sorted(set(kinds)))})" if kinds else ""
    if len(others) == len(layers):
        why = "keeps no keys and values of its context; all of its layers keep"
    else:
        why = (
            f"is a hybrid and can't be run from keys and values alone; {len(others)} of its "
            f"{len(layers)} layers keep"
        )
    raise ModelError(f"{name} {why} a {' or a '.join(kept)} of transformers{said}. {INSTEAD}")


def _read(
    module: Any, token_ids: npt.NDArray[np.int32], slots: torch.Tensor, caches: Sequence[Cache]
) -> torch.Tensor:
    """Run tokens after what is cached, cache them too, and return the last one's logits [V].

    ``slots`` [P + T] say where the context's positions are in ``caches``.
    """
    return _read_all(module, token_ids, slots, caches, told=1)[0].float()


def _read_all(
    module: Any,
    token_ids: npt.NDArray[np.int32],
    slots: torch.Tensor,
    caches: Sequence[Cache],
    *,
    told: int,
) -> torch.Tensor:
    """The same; return the logits [told, V] of the last tokens."""
    past = len(slots) - len(token_ids)
    cache = transformers.DynamicCache()
    if past:
        for number, parts in enumerate(caches):
            keys, values = (part.index_select(0, slots[:past]) for part in parts)
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], number)
    output = module(
        input_ids=torch.from_numpy(token_ids.astype(np.int64))[None],
        attention_mask=torch.ones(1, len(slots), dtype=torch.long),
        past_key_values=cache,
        use_cache=True,
        **_last_logits_only(module, told),
    )
    for parts, computed in zip(caches, _layers(module, output, len(slots)), strict=True):
        for part, new in zip(parts, computed, strict=True):
            part.index_copy_(0, slots[past:], new[0, :, past:].transpose(0, 1))
    logits: torch.Tensor = output.logits[0, -told:]
    return logits


@contextmanager
def _into_head(module: Any) -> Iterator[list[torch.Tensor]]:
    """What the LM head is given meanwhile: the normed hidden states [T, H] of each pass."""
    seen: list[torch.Tensor] = []
    head = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    try:
        yield seen
    finally:
        hook.remove()


def _last_logits_only(module: Any, told: int) -> dict[str, int]:
    """How to ask for that, where it can be: all of a long prompt's would take gigabytes."""
    known = inspect.signature(module.forward).parameters
    return {"logits_to_keep": told} if "logits_to_keep" in known else {}


def _slots(
    block_table: Sequence[int] | npt.NDArray[np.int64], end: int, block_tokens: int
) -> torch.Tensor:
    """Where positions ``[0, end)`` of a row are."""
    block, offset = np.divmod(np.arange(end), block_tokens)
    return torch.from_numpy(np.asarray(block_table, np.int64)[block] * block_tokens + offset)


def _allocate(module: Any, positions: int) -> list[Cache]:
    """Room for each layer's keys and values, of the shapes that a first token shows."""
    with torch.inference_mode():
        output = module(
            input_ids=torch.zeros(1, 1, dtype=torch.long),
            attention_mask=torch.ones(1, 1, dtype=torch.long),
            past_key_values=transformers.DynamicCache(),
            use_cache=True,
        )
    return [
        (_room(keys, positions), _room(values, positions))
        for keys, values in _layers(module, output, 1)
    ]


def _room(example: torch.Tensor, positions: int) -> torch.Tensor:
    return example.new_zeros(positions, example.shape[1], example.shape[3])


def _layers(module: Any, output: Any, positions: int) -> list[Cache]:
    """What each layer has cached: [1, K, positions, D] twice.

    Raises:
        ModelError: some layer caches something else, or nothing.
    """
    cache = getattr(output, "past_key_values", None)
    found = [(layer.keys, layer.values) for layer in getattr(cache, "layers", [])]
    for number, parts in enumerate(found):
        for part in parts:
            if part is None or part.dim() != 4 or part.shape[2] != positions:
                shape = "nothing" if part is None else list(part.shape)
                raise ModelError(
                    f"layer {number} of {type(module).__name__} keeps {shape}, not the keys and "
                    f"values of {positions} positions; such a model can't be served by this engine"
                )
    if not found:
        raise ModelError(f"{type(module).__name__} keeps no keys and values of its context")
    return found
