"""Compiled functions of a decode step: norm, gate, rotary embedding, attention and draw.

native.cpp and attend_last.cpp have the code. Callers fall back to torch if the functions cannot be
compiled. Matrix products are in ``weight_matrix.py``.

Letters in shapes: T tokens, R rows (turns), A query heads, K KV heads, D head_dim, B blocks per
row, H hidden size, I intermediate size, S rows to sample, V vocabulary.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kernels.compiled import DTYPES, FLOAT, INT, POINTER, address, function, library

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "swigluoai")
"""Activation functions of :meth:`Native.gate`, by transformers' names, and :func:`swigluoai`."""

HEAD_DIMS = (*range(8, 129, 8), 160, 192, 256)
"""Head dims that :meth:`Native.attend_last` is compiled for."""

ARGUMENTS: dict[str, list[Any]] = {
    "tg_norm": [POINTER] * 3 + [INT] * 2 + [FLOAT, INT],
    "tg_gate": [POINTER] * 2 + [INT] * 3,
    "tg_rotate_and_write": [POINTER] * 8 + [INT] * 5 + [FLOAT, INT],
    "tg_attend_last": [POINTER] * 5 + [INT] * 6 + [FLOAT, INT, FLOAT, POINTER],
}


class SlotMapping(NamedTuple):
    """Positions and KV slots of a step's tokens; each [T], int64, on the CPU."""

    positions: torch.Tensor
    """Context position of each token."""
    blocks: torch.Tensor
    """KV block of each token."""
    offsets: torch.Tensor
    """Position of each token in its block."""


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Successive decode rows of a step: each has one token, the last of the row's context."""

    first_token: int
    end_token: int
    """The group's tokens are ``[first_token, end_token)`` of the step."""
    tables: torch.Tensor
    """[R, B], int64: the blocks of each row's context. Rows need not be adjacent in memory."""
    lengths: torch.Tensor
    """[R], int64: context length of each row, with the row's token of this step."""
    window_tokens: int | None
    """Number of positions that a token attends to, its own included; None for full attention."""


def swigluoai(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gpt-oss's gate, [T, I], of ``gate_up`` [T, 2I] in which gate and up alternate.

    With both limited to 7, up also to -7: ``(up + 1) * gate * sigmoid(1.702 * gate)``.
    """
    gate = gate_up[..., ::2].clamp(max=7.0)
    up = gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


class Native:
    """The compiled functions, for CPU tensors of one dtype and models of one kind.

    Tensors are contiguous unless their docstring says otherwise.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        activation: str = "silu",
        *,
        norm_adds_one: bool = False,
    ) -> None:
        """``norm_adds_one``: all norms multiply by 1 + weight, as Gemma's do."""

        def bind(name: str) -> Callable[..., int]:
            return function(library, name, ARGUMENTS[name], dtype)

        self._activation = ACTIVATIONS.index(activation)
        self._norm_adds_one = norm_adds_one
        self._norm = bind("tg_norm")
        self._gate = bind("tg_gate")
        self._rotate_and_write = bind("tg_rotate_and_write")
        self._attend_last = bind("tg_attend_last")
        self._draw = function(library, "tg_draw", [POINTER] * 8 + [INT] * 2 + [POINTER])

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Compute :func:`~tidegate.kernels.norm.rms_norm` or ``rms_norm_plus_one`` of ``x`` [T, H]
        with ``weight`` [H]."""
        out = torch.empty_like(x)
        rows, size = x.shape
        at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._norm(*at, rows, size, epsilon, self._norm_adds_one)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``activation(gate) * up`` [T, I] of the halves of ``gate_up`` [T, 2I], or
        :func:`swigluoai`."""
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, inner))
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, inner, self._activation)
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        table: torch.Tensor,
        slot_mapping: SlotMapping,
        cache: torch.Tensor,
        epsilon: float,
    ) -> torch.Tensor:
        """Norm and rotate a step's queries and keys, and write its keys and values to the cache.

        Args:
            qkv: [T, A + 2K, D].
            qk_norm: [A + K, D], norm weights of the query and key heads; None for no norm.
            table: rotary table that :func:`tidegate.kernels.rope.rope_table` returned.
            slot_mapping: positions and KV slots of the tokens.
            cache: KV cache of one layer, [blocks, 2, K, block_tokens, D].
            epsilon: of the norm.

        Returns:
            The queries [T, A, D].
        """
        kv_heads, block_tokens, head_dim = cache.shape[2:]
        tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
        query = qkv.new_empty((tokens, heads, head_dim))
        positions, blocks, offsets = slot_mapping
        self._rotate_and_write(
            qkv.data_ptr(),
            None if qk_norm is None else qk_norm.data_ptr(),
            table.data_ptr(),
            positions.data_ptr(),
            blocks.data_ptr(),
            offsets.data_ptr(),
            query.data_ptr(),
            cache.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            epsilon,
            self._norm_adds_one,
        )
        return query

    def attend_last(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        group: LastTokens,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of each row's last token to its context: decode attention.

        Args:
            query: [R, A, D], one token per row, with D one of :data:`HEAD_DIMS`.
            cache: KV cache of one layer, [blocks, 2, K, block_tokens, D], to which the rows'
                tokens have been written.
            group: the rows.
            scale: factor of the products of queries and keys; None: 1 / sqrt(D).
            soft_cap: makes scores s into ``soft_cap * tanh(s / soft_cap)``.
            sinks: [A], float32, see :func:`tidegate.kernels.attention.attend`.

        Returns:
            [R, A * D].
        """
        rows, heads, head_dim = query.shape
        out = query.new_empty((rows, heads * head_dim))
        self._attend_last(
            query.data_ptr(),
            cache.data_ptr(),
            group.tables.data_ptr(),
            group.lengths.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            cache.shape[2],
            head_dim,
            cache.shape[3],
            group.tables.stride(0),
            head_dim**-0.5 if scale is None else scale,
            group.window_tokens or 0,
            soft_cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        return out

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: Floats,
        top_k: npt.NDArray[np.int64],
        top_p: Floats,
        seeds: Words,
        indices: Words,
        reports: "DrawReports | None" = None,
    ) -> tuple[npt.NDArray[np.int32], Floats]:
        """Compute :func:`tidegate.kernels.sampling.sample`.

        Args:
            logits: [S, V], float32.
            temperatures, top_k, top_p: [S].
            seeds: [S], RNG seed of each row, see :func:`tidegate.kernels.uniforms.uniforms`.
            indices: [S], draw index of each row within its seed's stream.
            reports: uncommon limits of the rows, and what is reported of them.

        Returns:
            Token ids [S], and log-probs [S].
        """
        rows, vocab = logits.shape
        ids, logprobs = np.empty(rows, np.int32), np.empty(rows, np.float32)
        self._draw(
            logits.data_ptr(),
            address(temperatures),
            address(top_k),
            address(top_p),
            address(seeds),
            address(indices),
            address(ids),
            address(logprobs),
            rows,
            vocab,
            None if reports is None else reports.address,
        )
        return ids, logprobs


class RowEdits(ctypes.Structure):
    """Edits of a row's logits before its draw, in the order of the fields: bias, bans, penalties as
    of :mod:`tidegate.kernels.penalties`, mask. Arrays are addresses, and counts their lengths."""

    _fields_ = (
        ("biased_ids", POINTER),
        ("biases", POINTER),
        ("biased", INT),
        ("banned_ids", POINTER),
        ("banned", INT),
        ("seen_ids", POINTER),
        ("seen_counts", POINTER),
        ("seen", INT),
        ("repetition", FLOAT),
        ("frequency", FLOAT),
        ("presence", FLOAT),
        ("allowed", POINTER),
    )
    """``allowed``: one bit per token that may be drawn, in uint32; None for all. Where it leaves
    nothing, the log-prob is -inf."""


class _Reports(ctypes.Structure):
    _fields_ = (
        ("min_p", POINTER),
        ("edits", POINTER),
        ("bans", POINTER),
        ("top_counts", POINTER),
        ("top_stride", INT),
        ("top_ids", POINTER),
        ("top_logprobs", POINTER),
        ("wants_raw", POINTER),
        ("raw_logprobs", POINTER),
        ("wants_kept", POINTER),
        ("kept_counts", POINTER),
        ("kept_ids", POINTER),
    )


class DrawReports:
    """Min-p and edits of a draw's rows, and what is reported of them beside token and log-prob."""

    def __init__(self, rows: int, vocab: int, top_max: int, kept_rows: int) -> None:
        """``top_max``: largest number of top tokens of a row; ``kept_rows``: number of rows whose
        kept tokens are reported."""
        self.min_p = np.zeros(rows, np.float32)
        self.edits = np.zeros(rows, np.uintp)
        """Address of each row's :class:`RowEdits`; 0 for none."""
        self.bans = np.zeros(rows, np.bool_)
        """Whether the bans of the row's edits apply."""
        self.top_counts = np.zeros(rows, np.int64)
        self.wants_raw = np.zeros(rows, np.bool_)
        self.wants_kept = np.zeros(rows, np.bool_)
        self.top_ids = np.empty((rows, top_max), np.int32)
        """The likeliest tokens of each row, in order; the rest of a row is undefined."""
        self.top_logprobs = np.empty((rows, top_max), np.float32)
        """Their log-probs, of the distribution sampled from; -inf if excluded."""
        self.raw_logprobs = np.empty(rows, np.float32)
        """Log-prob of the drawn token under the logits, without temperature and limits."""
        self.kept_counts = np.zeros(rows, np.int64)
        self.kept_ids = np.empty(kept_rows * vocab, np.int32)
        """Ids of the tokens that min-p, top-k and top-p leave, row after row, ascending."""
        self._structure = _Reports(
            self.min_p.ctypes.data,
            self.edits.ctypes.data,
            self.bans.ctypes.data,
            self.top_counts.ctypes.data,
            top_max,
            self.top_ids.ctypes.data,
            self.top_logprobs.ctypes.data,
            self.wants_raw.ctypes.data,
            self.raw_logprobs.ctypes.data,
            self.wants_kept.ctypes.data,
            self.kept_counts.ctypes.data,
            self.kept_ids.ctypes.data,
        )
        self.address = ctypes.addressof(self._structure)
        """Address of the C structure that holds the columns' addresses."""


def native(
    dtype: torch.dtype, activation: str = "silu", *, norm_adds_one: bool = False
) -> Native | None:
    """Return the compiled functions for ``dtype``, and models with these options.

    None if they cannot be compiled, or ``dtype`` is neither float32 nor bfloat16.
    """
    functions = library()
    if functions is None or dtype not in DTYPES:
        return None
    return Native(functions, dtype, activation, norm_adds_one=norm_adds_one)
