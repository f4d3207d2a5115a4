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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kernels.compiled import FLOAT, INT, POINTER, address, function, library
from tidegate.kernels.native import DrawReports
from tidegate.kernels.weight_matrix import Matrix

ADD_LAYERS = (*[POINTER] * 5, *[INT] * 3)

DECODE = (*[POINTER] * 14, *[INT] * 3)


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


class Product(ctypes.Structure):
    """Addresses of a matrix [N, K] and its bias [N]; :func:`product` makes it."""

    _fields_ = (
        ("weights", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
        ("outputs", INT),
        ("inputs", INT),
    )


class LayerAddresses(ctypes.Structure):
    """Addresses of one layer's weights, KV cache and rotary table; 0 for norms that it lacks."""

    _fields_ = (
        ("input_norm", POINTER),
        ("qk_norm", POINTER),
        ("attention_post_norm", POINTER),
        ("mlp_norm", POINTER),
        ("mlp_post_norm", POINTER),
        ("rotations", POINTER),
        ("cache", POINTER),
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
        ("window", INT),
    )
    """``rotations``: [P, 2, D]. ``cache``: [blocks, 2, K, block_tokens, D]. ``window``: number of
    positions that a token attends to, itself included; 0 for all."""


class ModelEnds(ctypes.Structure):
    """What a model has before its layers and after them."""

    _fields_ = (
        ("embedding", POINTER),
        ("final_norm", POINTER),
        ("head", POINTER),
        ("embedding_is_packed", INT),
        ("vocab", INT),
        ("embedding_scale", FLOAT),
    )
    """``head``: [V, H], float32, of a matrix that
    :func:`~tidegate.kernels.exact_matrix.make_exact_matrix` made for the layers' dtype.
    ``embedding_scale``: factor of the embeddings, representable in their dtype."""


class LayerSizes(ctypes.Structure):
    """Sizes and parameters that all layers share."""

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
    """``activation``: index in ``native.ACTIVATIONS``. ``norm_adds_one``: whether norms multiply by
    1 + gain. ``scale``: factor of the products of queries and keys. ``soft_cap``: 0 for none."""


def product(matrix: Matrix, bias: torch.Tensor | None) -> Product:
    """Return the addresses of a matrix with panels, and of its bias."""
    panels = matrix.panels
    assert panels is not None  # a precondition
    at = panels.weights.data_ptr(), at_or_0(panels.scales), at_or_0(bias)
    return Product(*at, *matrix.shape)


def at_or_0(tensor: torch.Tensor | None) -> int:
    """Return a tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


class Layers:
    """The layers of a model, by the addresses of what they compute with.

    The tensors are contiguous, on the CPU, and of one dtype. Values written to them take effect in
    the next step.
    """

    def __init__(
        self,
        layers: Sequence[LayerAddresses],
        sizes: LayerSizes,
        ends: ModelEnds | None,
        *,
        dtype: torch.dtype,
        tensors: object,
    ) -> None:
        """Without ``ends`` there is no :meth:`decode`. ``tensors`` are kept, because compiled code
        holds only their addresses."""
        self._tensors = tensors
        self._layers = (LayerAddresses * len(layers))(*layers)
        self._sizes = sizes
        self._at_layers, self._at_sizes = ctypes.addressof(self._layers), ctypes.addressof(sizes)
        self._add = _function("tg_layers", ADD_LAYERS, dtype)
        self._decode = _function("tg_decode", DECODE, dtype)
        self._ends = ends
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
