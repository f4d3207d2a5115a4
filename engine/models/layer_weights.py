"""Weights of one decoder layer, and the copy target of each published tensor.

Query, key and value projections are stacked in one matrix, and so are gate and up. Matrices have
the layouts of :mod:`tidegate.kernels.weight_matrix`.

Letters in shapes: H hidden size, I intermediate size (an expert's own in a layer of experts), E
experts, Q query heads x head_dim, K KV heads x head_dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tidegate.engine.models.model_config import Experts, LayerShape, ModelConfig
from tidegate.engine.weights.weight_store import CopyTarget, TensorSlice
from tidegate.kernels.weight_matrix import Matrix, take_over

MakeMatrix = Callable[[int, int], Matrix]
"""Allocates a matrix with the given numbers of outputs and inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Tensors of one decoder layer; None where the architecture has no such tensor."""

    input_norm: torch.Tensor
    """Gain of the norm before attention, [H]."""
    qkv: Matrix
    """Query, key and value projections, stacked, [Q + 2K, H]."""
    qkv_bias: torch.Tensor | None
    """Bias of the stacked projections, [Q + 2K]."""
    qk_norm: torch.Tensor | None
    """[query heads + KV heads, head_dim]: the norms' weights, repeated for each head."""
    sinks: torch.Tensor | None
    """Score of each query head without a value (gpt-oss), [query heads], float32."""
    output: Matrix
    """Output projection of attention, [H, Q]."""
    output_bias: torch.Tensor | None
    """Bias of the output projection, [H]."""
    attention_post_norm: torch.Tensor | None
    """Gain of the norm after attention (Gemma), [H]."""
    mlp_norm: torch.Tensor
    """Gain of the norm before the MLP, [H]."""
    router: Matrix | None
    """[E, H]; None without experts."""
    router_bias: torch.Tensor | None
    """[E]."""
    gate_up: tuple[Matrix, ...]
    """[2I, H] each: one, or one per expert. Gate and up are the halves of the rows; gpt-oss
    alternates them."""
    gate_up_bias: torch.Tensor | None
    """Bias of the stacked gate and up projections, [2I], or [E, 2I] of experts."""
    down: tuple[Matrix, ...]
    """[H, I] each: one, or one per expert."""
    down_bias: torch.Tensor | None
    """Bias of the down projection, [H], or [E, H] of experts."""
    mlp_post_norm: torch.Tensor | None
    """Gain of the norm after the MLP (Gemma), [H]."""


def allocate_layer(
    config: ModelConfig,
    shape: LayerShape,
    dtype: torch.dtype,
    matrix: MakeMatrix,
    router: MakeMatrix,
) -> LayerWeights:
    """Allocate a layer's tensors, uninitialised."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def empty_if(present: bool, *shape: int) -> torch.Tensor | None:
        return empty(*shape) if present else None

    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = (heads + 2 * kv_heads) * head_dim
    experts = config.experts if shape.has_experts else None
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    mlps = range(1) if experts is None else experts.local
    stacked = () if experts is None else (experts.count,)
    mlp_bias = config.mlp_bias if experts is None else experts.are_stacked
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=matrix(qkv, hidden),
        qkv_bias=empty_if(config.qkv_bias, qkv),
        qk_norm=empty_if(config.qk_norm, heads + kv_heads, head_dim),
        sinks=torch.empty(heads) if config.attention_sinks else None,
        output=matrix(hidden, heads * head_dim),
        output_bias=empty_if(config.output_bias, hidden),
        attention_post_norm=empty_if(config.post_norms, hidden),
        mlp_norm=empty(hidden),
        router=None if experts is None else router(experts.count, hidden),
        router_bias=empty_if(experts is not None and mlp_bias, *stacked),
        gate_up=tuple(matrix(2 * inner, hidden) for _ in mlps),
        gate_up_bias=empty_if(mlp_bias, *stacked, 2 * inner),
        down=tuple(matrix(hidden, inner) for _ in mlps),
        down_bias=empty_if(mlp_bias, *stacked, hidden),
        mlp_post_norm=empty_if(config.post_norms, hidden),
    )


def layer_targets(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, CopyTarget]]:
    """Yield the copy target of each published tensor, as views with its published shape."""
    for name, norm in _norms(layer):
        yield f"{name}.weight", _target(norm)
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield from _fused(names, (query, kv, kv), layer.qkv, layer.qkv_bias)
    yield from _fused(("self_attn.o_proj",), (config.hidden_size,), layer.output, layer.output_bias)
    if layer.qk_norm is not None:
        parts = layer.qk_norm.split_with_sizes([config.num_heads, config.num_kv_heads])
        for letter, part in zip("qk", parts, strict=True):
            yield f"self_attn.{letter}_norm.weight", CopyTarget((config.head_dim,), (part,))
    if layer.sinks is not None:
        yield "self_attn.sinks", _target(layer.sinks)
    if layer.router is not None and config.experts is not None and config.experts.are_stacked:
        yield from _stacked_experts(layer, layer.router)
    elif layer.router is not None:
        yield from _fused(("mlp.gate",), layer.router.shape[:1], layer.router, None)
        assert config.experts is not None  # set whenever there is a router
        numbers = config.experts.local
        for expert, gate_up, down in zip(numbers, layer.gate_up, layer.down, strict=True):
            yield from _mlp(f"mlp.experts.{expert}", gate_up, down)
    else:
        (gate_up,), (down,) = layer.gate_up, layer.down
        yield from _mlp("mlp", gate_up, down, layer.gate_up_bias, layer.down_bias)


def _stacked_experts(layer: LayerWeights, router: Matrix) -> Iterator[tuple[str, CopyTarget]]:
    """Yield the copy targets of experts that are published stacked and transposed."""
    yield from _fused(("mlp.router",), router.shape[:1], router, layer.router_bias)
    for name, matrices, bias in (
        ("gate_up_proj", layer.gate_up, layer.gate_up_bias),
        ("down_proj", layer.down, layer.down_bias),
    ):
        assert bias is not None  # set whenever experts are stacked
        outputs, inputs = matrices[0].shape
        target = _Stack(matrices, is_transposed=True)
        yield f"mlp.experts.{name}", CopyTarget((len(matrices), inputs, outputs), (target,))
        yield f"mlp.experts.{name}_bias", _target(bias)


def joint_targets(
    layer: LayerWeights, prefix: str, experts: Experts | None
) -> Iterator[tuple[str, CopyTarget]]:
    """Yield the copy targets of stacked expert tensors, which a directory holds one by one."""
    if layer.router is None or experts is None or experts.are_stacked:
        return
    local = experts.local
    local_range = None if experts.local_range is None else TensorSlice(0, local.start, len(local))
    for name, matrices, parts in (
        ("gate_up_proj", layer.gate_up, ("gate_proj", "up_proj")),
        ("down_proj", layer.down, ("down_proj",)),
    ):
        covers = tuple(
            f"{prefix}mlp.experts.{expert}.{part}.weight"
            for expert in range(experts.count)
            for part in parts
        )
        shape = (experts.count, *matrices[0].shape)
        yield (
            f"{prefix}mlp.experts.{name}",
            CopyTarget(shape, (_Stack(matrices),), covers, local_range),
        )


class _Stack:
    """Copy target that stacks the experts' matrices, [E, N, K], or [E, K, N] if transposed."""

    def __init__(self, matrices: Sequence[Matrix], *, is_transposed: bool = False) -> None:
        self._matrices = matrices
        self._is_transposed = is_transposed

    def copy_(self, source: torch.Tensor, /) -> None:
        if self._is_transposed:
            source = source.mT
        for matrix, part in zip(self._matrices, source, strict=True):
            matrix.rows(0, matrix.shape[0]).copy_(part)

    def take_over(self, other: "_Stack", /) -> None:
        for matrix_, other_matrix in zip(self._matrices, other._matrices, strict=True):
            rows = matrix_.shape[0]
            take_over(matrix_.rows(0, rows), other_matrix.rows(0, rows))

    def unpacked(self) -> torch.Tensor:
        stack = torch.stack([matrix.unpacked() for matrix in self._matrices])
        return stack.mT.contiguous() if self._is_transposed else stack

    def storages(self) -> list[torch.Tensor]:
        return [matrix.storage for matrix in self._matrices]

    element_dtype = None

    @property
    def is_rounded(self) -> bool:
        all_rows = (matrix.rows(0, matrix.shape[0]) for matrix in self._matrices)
        return any(not isinstance(rows, torch.Tensor) and rows.is_rounded for rows in all_rows)

    def add_bits(self, index: torch.Tensor, difference: torch.Tensor) -> bool:
        raise AssertionError("the stack is copied as a whole")


def _norms(layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the norms; with post-norms, the norm before the MLP has another name."""
    yield "input_layernorm", layer.input_norm
    if layer.attention_post_norm is None or layer.mlp_post_norm is None:
        yield "post_attention_layernorm", layer.mlp_norm
        return
    yield "post_attention_layernorm", layer.attention_post_norm
    yield "pre_feedforward_layernorm", layer.mlp_norm
    yield "post_feedforward_layernorm", layer.mlp_post_norm


def _mlp(
    prefix: str,
    gate_up: Matrix,
    down: Matrix,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Iterator[tuple[str, CopyTarget]]:
    inner = gate_up.shape[0] // 2
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    yield from _fused(names, (inner, inner), gate_up, gate_up_bias)
    yield from _fused((f"{prefix}.down_proj",), down.shape[:1], down, down_bias)


def _fused(
    names: tuple[str, ...],
    widths: tuple[int, ...],
    matrix: Matrix,
    bias: torch.Tensor | None,
) -> Iterator[tuple[str, CopyTarget]]:
    first = 0
    for name, width in zip(names, widths, strict=True):
        target = CopyTarget((width, matrix.shape[1]), (matrix.rows(first, width),))
        yield f"{name}.weight", target
        first += width
    if bias is not None:
        for name, part in zip(names, bias.split_with_sizes(widths), strict=True):
            yield f"{name}.bias", _target(part)


def _target(target: torch.Tensor) -> CopyTarget:
    return CopyTarget(tuple(target.shape), (target,))
