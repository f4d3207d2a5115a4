"""Step runner for models that only transformers implements: correct, and slow.

Implements ``Runner`` with the same block layout as
:class:`~tidegate.engine.execution.runner.ModelRunner`; made by ``served_model.FallbackModel``. For
each row, keys and values are gathered from its blocks into a transformers cache, and the new ones
are scattered back afterwards. Rows run one at a time, because models differ in how they pad.
Depends on transformers' own modeling code, held by ``models/fallback_weights.py``.

Letters in shapes: P past positions, T a row's tokens, K KV heads, D head width, H hidden size, V
vocabulary.
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

from tidegate.engine.execution.routed_experts import RoutedExpertsCache
from tidegate.engine.execution.runner import Row, reported_experts
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
from tidegate.policies.routing_replay import mixture_layers, record_routed_experts

PROBE_TOKENS = 12
PROBE_CHUNKS = (7, 1, 4)

PROBE_DIFFERENCE_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Limit, by dtype, of the mean difference of log-probs over the vocabulary when a context is read
in chunks. Chunks only add in another order; a model with other state is off by nats."""

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the argument of a ``transformers`` model that takes its KV cache."""

CACHE_ARGUMENT = (
    "cache"
    if hasattr(transformers.modeling_outputs.CausalLMOutputWithPast, "cache")
    else "past_key_values"
)
"""Name of the cache argument of transformers' models: ``cache`` since release 5.24,
``past_key_values`` before."""

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers of transformers that hold keys and values only."""

SUPPORTED_MODELS_HINT = (
    "Serve a model all of whose layers are attention over the whole context or a window of it, "
    "such as a Llama, Mistral, Qwen3 or Gemma"
)
"""Advice in the error for a model with state other than keys and values."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys [positions, K, D] and values; their widths D may differ."""


class FallbackRunner:
    """Runs one transformers model on one thread."""

    def __init__(self, weights: FallbackWeights, *, num_blocks: int, block_tokens: int) -> None:
        self.weights = weights
        """Replaced between two steps only, by weights of the same model and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._caches = _allocate(weights.module, num_blocks * block_tokens)
        self._routed_experts = RoutedExpertsCache(
            num_blocks, block_tokens, _num_experts(weights.module)
        )

    def swap(self, weights: WeightStore) -> None:
        """Use other weights of the same model from the next step on."""
        if not isinstance(weights, FallbackWeights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the KV cache."""
        return [part for cache in self._caches for part in cache]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run the rows one by one; sample after rows with ``sampling``, score rows with
        ``scoring``."""
        scores: list[RowScore] = []
        logits: list[torch.Tensor] = []
        sampling: list[RowSampling] = []
        for row in rows:
            end = row.start + len(row.token_ids)
            slots = _slots(row.block_table, end, self.block_tokens)
            if row.scoring is not None:
                scores.append(self._score(row, row.scoring, slots))
                continue
            with self._recorded(row, slots):
                out = _read(self.weights.module, row.token_ids, slots, self._caches)
            if row.sampling is not None:
                logits.append(out)
                sampling.append(row.sampling)
        if not sampling:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32), scores=scores)
        output = sample_rows(torch.stack(logits), sampling)
        routed_experts = reported_experts(self._routed_experts, rows)
        return replace(output, scores=scores, routed_experts=routed_experts)

    @contextmanager
    def _recorded(self, row: Row, slots: torch.Tensor) -> Iterator[None]:
        """Record the routed experts of a row's tokens, if the row asks for them."""
        if row.experts_from is None:
            yield
            return
        with record_routed_experts(self.weights.module) as recorder:
            yield
        experts = recorder.routed_experts().numpy()
        self._routed_experts.write(slots[row.start :].numpy(), experts)

    def _score(self, row: Row, scoring: RowScoring, slots: torch.Tensor) -> RowScore:
        """Score a row's last positions in pieces, to bound the memory of their logits."""
        module, end = self.weights.module, len(row.token_ids)
        first = end - scoring.positions
        if first:
            _read(module, row.token_ids[:first], slots[: row.start + first], self._caches)
        pieces = []
        for part, piece in in_pieces(scoring, module.config.get_text_config().vocab_size):
            start, stop = first + part.start, first + part.stop
            tokens, part_slots = row.token_ids[start:stop], slots[: row.start + stop]
            if scoring.reads == "logprobs":
                logits = _read_all(
                    module, tokens, part_slots, self._caches, last_tokens=piece.positions
                )
                pieces.append(score_logits(logits.float(), piece))
                continue
            with _capture_head_inputs(module) as hidden:
                _read_all(module, tokens, part_slots, self._caches, last_tokens=piece.positions)
            pieces.append(score_hidden(hidden[0][-piece.positions :], piece))
        return join_scores(pieces)


def routed_experts_refusal(module: Any) -> str:
    """Return why a model's routed experts can't be recorded; empty if they can."""
    try:
        mixture_layers(module)
    except ModelError as error:
        return str(error)
    return ""


def _num_experts(module: Any) -> int:
    """Return the number of experts of a mixture's largest layer; 0 for other models."""
    if routed_experts_refusal(module):
        return 0
    return max(layer.num_experts for layer in mixture_layers(module))


def kv_token_bytes(module: Any) -> int:
    """Return the bytes of one position's keys and values in all layers."""
    return sum(part.nbytes for cache in _allocate(module, 1) for part in cache)


@torch.inference_mode()
def refuse_recurrent_state(module: Any, vocab_size: int) -> None:
    """Check that keys and values are the model's whole state, by reading one context in chunks.

    Raises:
        ModelError: chunks change the log-probs, or the model does not expose keys and values.
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
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{name} can't be run from keys and values alone: {reason}. {SUPPORTED_MODELS_HINT}"
        ) from error
    difference = float((whole.log_softmax(-1) - chunked.log_softmax(-1)).abs().mean())
    if not difference <= PROBE_DIFFERENCE_MAX[module.dtype]:
        raise ModelError(
            f"{name} keeps more state of a context than keys and values: log-probs differ by "
            f"{difference:.2g} on average if the context is read in chunks. State-space and "
            f"recurrent models can't be served by this engine. {SUPPORTED_MODELS_HINT}"
        )


def _refuse_layers(module: Any) -> None:
    """Refuse a model for which transformers declares other cache layers than keys and values.

    Raises:
        ModelError: it has such layers.
    """
    text = module.config.get_text_config()
    try:
        layers = transformers.DynamicCache(config=text).layers
    except Exception:  # noqa: BLE001  (an unreadable config; the probe decides)
        return
    other_layers = [layer for layer in layers if type(layer).__name__ not in KEYS_AND_VALUES]
    if not other_layers:
        return
    name, kinds = type(module).__name__, getattr(text, "layer_types", None) or ()
    cache_kinds = sorted({type(layer).__name__ for layer in other_layers})
    layer_types = f" (layer_types: {', '.join(sorted(set(kinds)))})" if kinds else ""
    if len(other_layers) == len(layers):
        reason = "keeps no keys and values of its context; all of its layers keep"
    else:
        reason = (
            f"is a hybrid and can't be run from keys and values alone; {len(other_layers)} of its "
            f"{len(layers)} layers keep"
        )
    raise ModelError(
        f"{name} {reason} a {' or a '.join(cache_kinds)} of transformers{layer_types}. "
        f"{SUPPORTED_MODELS_HINT}"
    )


def _read(
    module: Any, token_ids: npt.NDArray[np.int32], slots: torch.Tensor, caches: Sequence[Cache]
) -> torch.Tensor:
    """Run tokens after the cached ones, cache their keys and values, return the last logits [V].

    ``slots`` [P + T] are the context's positions in ``caches``.
    """
    return _read_all(module, token_ids, slots, caches, last_tokens=1)[0].float()


def _read_all(
    module: Any,
    token_ids: npt.NDArray[np.int32],
    slots: torch.Tensor,
    caches: Sequence[Cache],
    *,
    last_tokens: int,
) -> torch.Tensor:
    """Like ``_read``, but return the logits [last_tokens, V] of the last tokens."""
    past = len(slots) - len(token_ids)
    cache = transformers.DynamicCache()
    if past:
        for number, parts in enumerate(caches):
            keys, values = (part.index_select(0, slots[:past]) for part in parts)
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], number)
    output = module(
        input_ids=torch.from_numpy(token_ids.astype(np.int64))[None],
        attention_mask=torch.ones(1, len(slots), dtype=torch.long),
        use_cache=True,
        **cache_argument(module, cache),
        **_last_logits_only(module, last_tokens),
    )
    for parts, computed in zip(caches, _layers(module, cache, len(slots)), strict=True):
        for part, new in zip(parts, computed, strict=True):
            part.index_copy_(0, slots[past:], new[0, :, past:].transpose(0, 1))
    logits: torch.Tensor = output.logits[0, -last_tokens:]
    return logits


@contextmanager
def _capture_head_inputs(module: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the inputs of the LM head, one tensor [T, H] per forward pass."""
    inputs: list[torch.Tensor] = []
    head = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0][0]))
    try:
        yield inputs
    finally:
        hook.remove()


def cache_argument(module: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that hands ``cache`` to a ``transformers`` model.

    transformers 5.24 renamed ``past_key_values`` to ``cache``. A model with code of its own may
    have either name under any release, so the model's signature decides where it names one.
    """
    parameters = inspect.signature(module.forward).parameters
    named = [name for name in (CACHE_ARGUMENT, *CACHE_ARGUMENTS) if name in parameters]
    return {(named or [CACHE_ARGUMENT])[0]: cache}


def _last_logits_only(module: Any, last_tokens: int) -> dict[str, int]:
    """Return the argument that limits the logits to the last tokens, if the model has one. Logits
    of a whole long prompt would take gigabytes."""
    parameters = inspect.signature(module.forward).parameters
    return {"logits_to_keep": last_tokens} if "logits_to_keep" in parameters else {}


def _slots(
    block_table: Sequence[int] | npt.NDArray[np.int64], end: int, block_tokens: int
) -> torch.Tensor:
    """Return the cache slots of a row's positions ``[0, end)``."""
    block, offset = np.divmod(np.arange(end), block_tokens)
    return torch.from_numpy(np.asarray(block_table, np.int64)[block] * block_tokens + offset)


def _allocate(module: Any, positions: int) -> list[Cache]:
    """Allocate each layer's keys and values, with the shapes seen in a forward
    pass of one token."""
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        module(
            input_ids=torch.zeros(1, 1, dtype=torch.long),
            attention_mask=torch.ones(1, 1, dtype=torch.long),
            use_cache=True,
            **cache_argument(module, cache),
        )
    return [
        (_empty_cache(keys, positions), _empty_cache(values, positions))
        for keys, values in _layers(module, cache, 1)
    ]


def _empty_cache(example: torch.Tensor, positions: int) -> torch.Tensor:
    return example.new_zeros(positions, example.shape[1], example.shape[3])


def _layers(module: Any, cache: Any, positions: int) -> list[Cache]:
    """Return each layer's cached keys and values, [1, K, positions, D] each.

    Raises:
        ModelError: a layer caches something else, or nothing.
    """
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    for number, parts in enumerate(layers):
        for part in parts:
            if part is None or part.dim() != 4 or part.shape[2] != positions:
                shape = "nothing" if part is None else list(part.shape)
                raise ModelError(
                    f"layer {number} of {type(module).__name__} keeps {shape}, not the keys and "
                    f"values of {positions} positions; such a model can't be served by this engine"
                )
    if not layers:
        raise ModelError(
            f"{type(module).__name__} keeps no keys and values of its context, from which turns "
            f"continue. {SUPPORTED_MODELS_HINT}"
        )
    return layers
