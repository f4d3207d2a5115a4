"""Runs a step through a model's dense layers, or a whole step of decodes, in one compiled call.

layers.cpp calls the functions of :mod:`~tidegate.kernels.native` and
:mod:`~tidegate.kernels.weight_matrix` in the model's order, so the results have the same bits; it
saves nine Python calls per layer. Every token of the step must attend on its own, as when all rows
decode.

Letters in shapes: T tokens, H hidden size, A query heads, K KV heads, D head_dim, I intermediate
size, P positions, B blocks of a context, V vocabulary.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kernels.compiled import FLOAT, INT, POINTER, address, function, library
from tidegate.kernels.native import ACTIVATIONS, DrawReports
from tidegate.kernels.weight_matrix import Matrix, PackedMatrix

ADD_LAYERS = (*[POINTER] * 5, *[INT] * 3)

DECODE = (*[POINTER] * 14, *[INT] * 3)


class Projection(NamedTuple):
    """A matrix [N, K] with panels, and its bias [N]."""

    matrix: Matrix
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """Weights, KV cache and tables of one layer, contiguous, on the CPU, of one dtype."""

    input_norm: torch.Tensor
    """Gain of the norm before attention, [H]."""
    qkv: Projection
    """[(A + 2K) * D, H]"""
    qk_norm: torch.Tensor | None
    """Gains of the norms of query and key heads, [A + K, D]."""
    rotations: torch.Tensor
    """[P, 2, D], of :func:`tidegate.kernels.rope.rope_table`."""
    cache: torch.Tensor
    """[blocks, 2, K, block_tokens, D]"""
    window_tokens: int | None
    """Number of positions that a token attends to, itself included; None: all."""
    output: Projection
    """Output projection of attention, [H, A * D]."""
    attention_post_norm: torch.Tensor | None
    """Gain of the norm of attention's output, [H]; None for no norm."""
    mlp_norm: torch.Tensor
    """Gain of the norm before the MLP, [H]."""
    gate_up: Projection
    """Gate and up projections, stacked, [2I, H]."""
    down: Projection
    """Down projection of the MLP, [H, I]."""
    mlp_post_norm: torch.Tensor | None
    """Gain of the norm of the MLP's output, [H]; None for no norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayerParams:
    """Parameters that all layers share."""

    num_heads: int
    """Number of query heads, A."""
    activation: str
    """One of ``native.ACTIVATIONS``."""
    norm_epsilon: float
    norm_adds_one: bool
    """Whether norms multiply by 1 + gain."""
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_soft_cap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnds:
    """What a model has before its layers and after them."""

    embedding: Matrix
    """[V, H], of the layers' dtype."""
    embedding_scale: float
    """Factor of the embeddings, representable in their dtype."""
    final_norm: torch.Tensor
    """Gain, [H]."""
    head: Matrix
    """[V, H], float32, made by :func:`~tidegate.kernels.exact_matrix.make_exact_matrix` for the
    layers' dtype."""


class DecodeColumns(NamedTuple):
    """Inputs of a step in which every row decodes one token; [T] each, contiguous."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """Context position of each token."""
    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: npt.NDArray[np.float32]
    """Share of the probability that the likeliest tokens to keep have; 1 keeps all."""
    seeds: npt.NDArray[np.uint64]
    """RNG seeds, see :func:`~tidegate.kernels.uniforms.uniforms`."""
    draws: npt.NDArray[np.uint64]
    """Index of each row's random number in its seed's stream."""


class _Product(ctypes.Structure):
    _fields_ = (
        ("weights", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
        ("outputs", INT),
        ("inputs", INT),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", POINTER),
        ("qk_norm", POINTER),
        ("attention_post_norm", POINTER),
        ("mlp_norm", POINTER),
        ("mlp_post_norm", POINTER),
        ("rotations", POINTER),
        ("cache", POINTER),
        ("qkv", _Product),
        ("output", _Product),
        ("gate_up", _Product),
        ("down", _Product),
        ("window", INT),
    )


class _Ends(ctypes.Structure):
    _fields_ = (
        ("embedding", POINTER),
        ("final_norm", POINTER),
        ("head", POINTER),
        ("embedding_is_packed", INT),
        ("vocab", INT),
        ("embedding_scale", FLOAT),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("layers", INT),
        ("hidden", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("head_dim", INT),
        ("block_tokens", INT),
        ("inner", INT),
        ("activation", INT),
        ("norm_adds_one", INT),
        ("epsilon", FLOAT),
        ("scale", FLOAT),
        ("soft_cap", FLOAT),
    )


class Layers:
    """Addresses of the tensors that a sequence of layers computes with.

    The tensors are referenced, because compiled code holds only their addresses. Values written to
    them take effect in the next step.
    """

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        params: SharedLayerParams,
        ends: ModelEnds | None = None,
    ) -> None:
        """Without ``ends`` there is no :meth:`decode`."""
        first = layers[0]
        _, _, kv_heads, block_tokens, head_dim = first.cache.shape
        self._dense_layers = layers
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._sizes = _Sizes(
            len(layers),
            first.input_norm.shape[0],
            params.num_heads,
            kv_heads,
            head_dim,
            block_tokens,
            first.down.matrix.shape[1],
            ACTIVATIONS.index(params.activation),
            params.norm_adds_one,
            params.norm_epsilon,
            params.attention_scale,
            params.attention_soft_cap or 0.0,
        )
        at = ctypes.addressof(self._layers), ctypes.addressof(self._sizes)
        self._at_layers, self._at_sizes = at
        self._add = _function("tg_layers", ADD_LAYERS, first.input_norm.dtype)
        self._decode = _function("tg_decode", DECODE, first.input_norm.dtype)
        self._model_ends = ends
        self._ends = None if ends is None else _ends(ends)
        self._columns: DecodeColumns | None = None
        """Columns of the last :meth:`decode`; most steps have the same ones."""
        self._at_columns: list[int] = []

    @property
    def decodes(self) -> bool:
        """Whether there is :meth:`decode`."""
        return self._ends is not None

    def decode(
        self,
        columns: DecodeColumns,
        tables: npt.NDArray[np.int64],
        reports: DrawReports | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Run a whole step, from the tokens' embeddings to the draw of their successors, and write
        keys and values.

        Args:
            columns: the rows.
            tables: [T, B], contiguous: the blocks of each token's context.
            reports: uncommon limits of the draw, and what is reported of it.

        Returns:
            Token ids [T], and log-probs [T], as of :meth:`~tidegate.kernels.native.Native.draw`.
        """
        assert self._ends is not None
        if columns is not self._columns:
            self._columns, self._at_columns = columns, [address(column) for column in columns]
        rows = len(columns.token_ids)
        ids, logprobs = np.empty(rows, np.int32), np.empty(rows, np.float32)
        token_ids, positions, *drawing = self._at_columns
        self._decode(
            self._at_layers,
            self._at_sizes,
            ctypes.addressof(self._ends),
            token_ids,
            positions,
            address(tables),
            *drawing,
            address(ids),
            address(logprobs),
            None if reports is None else reports.address,
            rows,
            tables.shape[1],
            torch.get_num_threads(),
        )
        return ids, logprobs

    def add_(self, hidden: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> None:
        """Run all layers on ``hidden`` [T, H] in place, and write keys and values.

        Args:
            hidden: contiguous, the token embeddings.
            positions: [T], int64, context position of each token; it attends to all up to its own,
                within a layer's window.
            tables: [T, B], int64: the blocks of each token's context. Rows need not be adjacent in
                memory.
        """
        self._add(
            self._at_layers,
            self._at_sizes,
            positions.data_ptr(),
            tables.data_ptr(),
            hidden.data_ptr(),
            hidden.shape[0],
            tables.stride(0),
            torch.get_num_threads(),
        )


@functools.cache
def _function(name: str, arguments: tuple[type, ...], dtype: torch.dtype) -> Callable[..., int]:
    """Return the compiled function, shared by the layers of all weight versions."""
    functions = library()
    assert functions is not None  # otherwise no matrix has panels
    return function(functions, name, arguments, dtype)


def _ends(ends: ModelEnds) -> _Ends:
    return _Ends(
        embedding=ends.embedding.storage.data_ptr(),
        final_norm=ends.final_norm.data_ptr(),
        head=ends.head.storage.data_ptr(),
        embedding_is_packed=isinstance(ends.embedding, PackedMatrix),
        vocab=ends.head.shape[0],
        embedding_scale=ends.embedding_scale,
    )


def _layer(layer: DenseLayer) -> _Layer:
    return _Layer(
        input_norm=layer.input_norm.data_ptr(),
        qk_norm=_at(layer.qk_norm),
        attention_post_norm=_at(layer.attention_post_norm),
        mlp_norm=layer.mlp_norm.data_ptr(),
        mlp_post_norm=_at(layer.mlp_post_norm),
        rotations=layer.rotations.data_ptr(),
        cache=layer.cache.data_ptr(),
        qkv=_product(layer.qkv),
        output=_product(layer.output),
        gate_up=_product(layer.gate_up),
        down=_product(layer.down),
        window=layer.window_tokens or 0,
    )


def _product(projection: Projection) -> _Product:
    panels = projection.matrix.panels
    assert panels is not None  # a precondition of ``DenseLayer``
    at = panels.weights.data_ptr(), _at(panels.scales), _at(projection.bias)
    return _Product(*at, *projection.matrix.shape)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
