"""Keys, values and recurrent states of transformers models, in the blocks of Tidegate's KV cache.

``BlockMemory`` owns the tensors; ``OpenBlocks`` has the cache argument of one forward pass over
several rows. Attention layers gather their rows' contexts from the blocks and scatter new keys
and values there. Layers with a recurrent state (state-space models, linear attention, short
convolutions) keep one state per block: the state after the block's last computed position. So every
turn that shares a full block continues from that block's state, and the scheduler handles blocks
only.

Letters in shapes: R rows, L positions of the longest row, T new tokens of each row, K KV heads, D
head width.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import cache_utils

from tidegate.errors import ModelError

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

STATES = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Cache layers of transformers that hold a recurrent state, and keys and values beside it."""

EMPTY = ("DummyLayer",)
"""Cache layers of transformers that hold nothing, such as an MLP's."""

SUPPORTED_MODELS_HINT = (
    "Serve a model whose layers are attention, over the whole context or a window of it, or whose "
    "recurrent states transformers keeps in its linear-attention cache, such as a Llama, Qwen3, "
    "Gemma, Qwen3.5, Falcon-H1 or Nemotron-H"
)
"""Advice in the error for a model with other state."""


@dataclass(frozen=True, slots=True)
class PassRow:
    """Blocks of one row of a forward pass."""

    block_table: Sequence[int]
    start: int
    """Number of positions before the row's new tokens."""
    end: int
    """Number of positions with them."""


@dataclass(frozen=True, slots=True)
class _LayerMemory:
    """Tensors that one layer keeps: keys and values per position, states per block."""

    keys: torch.Tensor | None
    """[positions, K, D]; None for a layer without attention."""
    values: torch.Tensor | None
    """[positions, K, D], of a width of their own."""
    conv_states: dict[int, torch.Tensor]
    """[blocks, ...] by the state's index in the layer."""
    recurrent_states: dict[int, torch.Tensor]
    """[blocks, ...] by the state's index in the layer."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors."""
        if self.keys is not None and self.values is not None:
            yield self.keys
            yield self.values
        yield from self.states()

    def states(self) -> Iterator[torch.Tensor]:
        """Yield the states of all blocks."""
        yield from self.conv_states.values()
        yield from self.recurrent_states.values()


class BlockMemory:
    """Keys, values and states of all blocks, in the shapes that a model's layers keep."""

    def __init__(self, module: Any, num_blocks: int, block_tokens: int) -> None:
        """Allocate the blocks, with the shapes seen in a forward pass of one token.

        Raises:
            ModelError: a layer keeps something else.
        """
        self.block_tokens = block_tokens
        cache = empty_cache(module)
        with torch.inference_mode():
            module(
                input_ids=torch.zeros(1, 1, dtype=torch.long),
                attention_mask=torch.ones(1, 1, dtype=torch.long),
                use_cache=True,
                **cache_argument(module, cache),
            )
        _check_layers(module, cache)
        self._layers = [
            _LayerMemory(
                _by_position(getattr(layer, "keys", None), num_blocks * block_tokens),
                _by_position(getattr(layer, "values", None), num_blocks * block_tokens),
                _by_block(getattr(layer, "conv_states", {}), num_blocks),
                _by_block(getattr(layer, "recurrent_states", {}), num_blocks),
            )
            for layer in cache.layers
        ]
        self.has_states = any(True for layer in self._layers for _ in layer.states())
        """Whether a layer keeps a recurrent state."""

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        return [tensor for layer in self._layers for tensor in layer.tensors()]

    def token_bytes(self) -> int:
        """Return the bytes of one position's keys and values in all layers."""
        return sum(
            part.nbytes // len(part)
            for layer in self._layers
            for part in (layer.keys, layer.values)
            if part is not None
        )

    def state_bytes(self) -> int:
        """Return the bytes of one block's states in all layers; 0 without recurrent layers."""
        return sum(part.nbytes // len(part) for layer in self._layers for part in layer.states())


class OpenBlocks:
    """The blocks of one forward pass's rows, padded on the left to the longest context."""

    def __init__(self, memory: BlockMemory, rows: Sequence[PassRow]) -> None:
        """All rows have equally many new tokens. If the model has states, all rows start at 0 or
        none does, and no row's new tokens pass the end of a block, because a forward pass leaves
        one state per row."""
        block_tokens = memory.block_tokens
        length = max(row.end for row in rows)
        tokens = rows[0].end - rows[0].start
        block, offset = np.divmod(np.arange(length), block_tokens)
        slots = np.zeros((len(rows), length), np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for number, row in enumerate(rows):
            table = np.asarray(row.block_table, np.int64)
            slots[number, length - row.end :] = (
                table[block[: row.end]] * block_tokens + offset[: row.end]
            )
            mask[number, length - row.end :] = 1
        self.attention_mask = torch.from_numpy(mask)
        """[R, L], 0 for padding."""
        all_slots = torch.from_numpy(slots)
        self.new_slots = all_slots[:, length - tokens :].flatten()
        """[R * T], slots of the new tokens."""
        self.position_ids = torch.tensor([[row.start] for row in rows]) + torch.arange(tokens)
        """[R, T], context positions of the new tokens."""
        self._ends = _blocks_at([row.end for row in rows], rows, block_tokens)
        starts = None
        if rows[0].start:
            starts = _blocks_at([row.start for row in rows], rows, block_tokens)
        self._state_layers: list[tuple[_LayerMemory, Any]] = []
        layers: list[Any] = []
        for layer in memory._layers:
            has_states = bool(layer.conv_states or layer.recurrent_states)
            if layer.keys is None and not has_states:
                layers.append(_DUMMY())
                continue
            opened: Any
            if layer.keys is None:
                opened = _STATE(**_state_count(layer))
            elif has_states:
                opened = _BlockHybrid(**_state_count(layer))
            else:
                opened = _BlockAttention()
            if layer.keys is not None:
                opened.open(layer, all_slots, self.new_slots, length - tokens)
            if has_states:
                _load_states(opened, layer, starts, len(rows))
                self._state_layers.append((layer, opened))
            layers.append(opened)
        self.cache: Any = transformers.DynamicCache()
        """Cache argument of the model's forward pass."""
        self.cache.layers = layers
        self.cache.layer_class_to_replicate = None

    def store_states(self) -> None:
        """Write the rows' states after the forward pass into their last blocks."""
        for memory, layer in self._state_layers:
            for stored, states in (
                (memory.conv_states, layer.conv_states),
                (memory.recurrent_states, layer.recurrent_states),
            ):
                for index, tensor in stored.items():
                    tensor.index_copy_(0, self._ends, states[index])


def _blocks_at(ends: list[int], rows: Sequence[PassRow], block_tokens: int) -> torch.Tensor:
    """Return the block [R] that holds each row's state after its first ``ends`` positions."""
    pairs = zip(ends, rows, strict=True)
    return torch.tensor([int(row.block_table[(end - 1) // block_tokens]) for end, row in pairs])


class _BlockLayer:
    """Keys and values in blocks, in place of those of a transformers cache layer."""

    def open(
        self, memory: _LayerMemory, slots: torch.Tensor, new_slots: torch.Tensor, past: int
    ) -> None:
        """Use the slots [R, L] of ``memory``, of which ``new_slots`` [R * T] are to be written."""
        self._memory, self._slots, self._new_slots, self._past = memory, slots, new_slots, past
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [R, K, T, D]; return those of the contexts, [R, K, L, D]."""
        keys, values = self._memory.keys, self._memory.values
        assert keys is not None
        assert values is not None
        return self._exchange(keys, key_states), self._exchange(values, value_states)

    def _exchange(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        stored.index_copy_(0, self._new_slots, new.transpose(1, 2).flatten(0, 1))
        gathered = stored.index_select(0, self._slots.flatten())
        return gathered.view(*self._slots.shape, *stored.shape[1:]).transpose(1, 2)

    def get_seq_length(self) -> int:
        """Return the number of positions before the new tokens, padding included."""
        return self._past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the positions of the longest row with the new tokens, and their offset."""
        return self._past + query_length, 0


_DUMMY: Any = getattr(cache_utils, "DummyLayer", None)
_ATTENTION: Any = cache_utils.DynamicLayer
_STATE: Any = getattr(cache_utils, "LinearAttentionLayer", object)
_HYBRID: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)


class _BlockAttention(_BlockLayer, _ATTENTION):  # type: ignore[misc]
    """Cache layer of attention."""


class _BlockHybrid(_BlockLayer, _HYBRID):  # type: ignore[misc]
    """Cache layer of attention beside a recurrent state."""


def _state_count(layer: _LayerMemory) -> dict[str, int]:
    """Return the argument for the number of states, which releases before 5.2x do not have."""
    count = max([0, *layer.conv_states, *layer.recurrent_states]) + 1
    return {} if count == 1 else {"number_of_states": count}


def _load_states(opened: Any, memory: _LayerMemory, starts: torch.Tensor | None, rows: int) -> None:
    """Load the rows' states from the blocks ``starts`` [R]; None for contexts that begin."""
    for stored, states, initialized in (
        (memory.conv_states, opened.conv_states, opened.is_conv_states_initialized),
        (memory.recurrent_states, opened.recurrent_states, opened.is_recurrent_states_initialized),
    ):
        for index, tensor in stored.items():
            if starts is None:
                states[index] = tensor.new_zeros(rows, *tensor.shape[1:])
            else:
                states[index] = tensor.index_select(0, starts)
            initialized[index] = True
            if stored is memory.conv_states:
                opened.conv_kernel_size[index] = tensor.shape[-1]
                opened.dtype, opened.device = tensor.dtype, tensor.device
    for index in opened.has_previous_state:
        opened.has_previous_state[index] = starts is not None


def empty_cache(module: Any) -> Any:
    """Return an empty transformers cache for a model: of its own kinds of layers if some are
    recurrent, else of keys and values of whole contexts, windows included."""
    if has_recurrent_layers(module.config):
        return transformers.DynamicCache(config=module.config.get_text_config())
    return transformers.DynamicCache()


def has_recurrent_layers(config: Any) -> bool:
    """Return whether transformers declares layers with a recurrent state for a model."""
    return any(type(layer).__name__ in STATES for layer in declared_layers(config))


def declared_layers(config: Any) -> list[Any]:
    """Return the cache layers that transformers declares for a model; empty if its config can't be
    read."""
    try:
        return list(transformers.DynamicCache(config=config.get_text_config()).layers)
    except Exception:  # noqa: BLE001  (a forward pass decides)
        return []


def cache_argument(module: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that hands ``cache`` to a ``transformers`` model.

    transformers 5.24 renamed ``past_key_values`` to ``cache``. A model with code of its own may
    have either name under any release, so the model's signature decides where it names one.
    """
    parameters = parameters_of(module.__class__)
    named = [name for name in (CACHE_ARGUMENT, *CACHE_ARGUMENTS) if name in parameters]
    return {(named or [CACHE_ARGUMENT])[0]: cache}


@functools.cache
def parameters_of(model: Any) -> frozenset[str]:
    """Return the names of the parameters of a model class's forward pass."""
    return frozenset(inspect.signature(model.forward).parameters)


def _check_layers(module: Any, cache: Any) -> None:
    """Check what each layer keeps of one token.

    Raises:
        ModelError: a layer keeps other things than keys, values and states, or none keeps any.
    """
    keeps = False
    for number, layer in enumerate(cache.layers):
        name = type(layer).__name__
        if name in EMPTY:
            continue
        has_attention = name in KEYS_AND_VALUES or name in STATES[1:]
        for part in (layer.keys, layer.values) if has_attention else ():
            if part is None or part.dim() != 4 or part.shape[2] != 1:
                shape = "nothing" if part is None else list(part.shape)
                raise ModelError(
                    f"layer {number} of {type(module).__name__} keeps {shape}, not the keys and "
                    f"values of 1 position; such a model can't be served by this engine"
                )
        keeps = True
    if not keeps:
        raise ModelError(
            f"{type(module).__name__} keeps nothing of its context in the cache of transformers, "
            f"from which turns continue. {SUPPORTED_MODELS_HINT}"
        )


def _by_position(example: torch.Tensor | None, positions: int) -> torch.Tensor | None:
    if example is None:
        return None
    return example.new_zeros(positions, example.shape[1], example.shape[3])


def _by_block(examples: dict[int, torch.Tensor | None], blocks: int) -> dict[int, torch.Tensor]:
    return {
        index: example.new_zeros(blocks, *example.shape[1:])
        for index, example in examples.items()
        if example is not None
    }
