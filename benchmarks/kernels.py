"""Time of each GPU kernel, against torch's own operations and the hardware's roofline.

``python -m benchmarks.device --stages kernels`` prints a :class:`Row` per :class:`Case`.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import table
from tidegate.kernels.fused_sampling import SamplingColumns, fused_sample_triton
from tidegate.kernels.head_logprobs import head_logprobs_triton
from tidegate.kernels.norm import rms_norm
from tidegate.kernels.paged_attention import AttentionRule, PagedRows, paged_attention_triton
from tidegate.kernels.residual_norm import residual_norm_triton
from tidegate.kernels.rope import apply_rope, rope_table
from tidegate.kernels.rope_write import rope_write_triton

RUNS = 50
CPU_RUNS = 3
"""Runs on a CPU, in Triton's interpreter, where times mean nothing."""
WARMUP_RUNS = 5
"""Runs before timing; the first compiles."""
COPY_BYTES = 2**30
GEMM_SIDE = 8192
FLUSH_BYTES = 2**28
"""Bytes written between runs, more than any GPU's cache: inputs come from memory, as in a step of
many layers."""
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model and the step that the cases are made of."""

    rows: int
    context_tokens: int
    chunk_tokens: int
    """Query tokens of the prefilling row, at the end of its context."""
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    scored_tokens: int
    dtype: torch.dtype


REAL = Sizes(
    rows=128,
    context_tokens=4096,
    chunk_tokens=2048,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    vocab=151_936,
    scored_tokens=4096,
    dtype=torch.bfloat16,
)
"""Shape of an 8-billion-parameter Llama with Qwen's vocabulary, at 128 turns."""


TINY = Sizes(
    rows=3,
    context_tokens=48,
    chunk_tokens=7,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    vocab=300,
    scored_tokens=5,
    dtype=torch.float32,
)
"""Shape for Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work, done by two implementations from equal inputs."""

    name: str
    ours: Callable[[], torch.Tensor]
    peer: Callable[[], torch.Tensor]
    moved_bytes: int
    """Minimum traffic: each input read and each output written once."""
    flops: int
    """Operations of the matrix products."""


def cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Yield the cases one at a time, because their tensors may fill much of a GPU."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(sizes.dtype)

    yield _attention("paged_attention_decode", sizes, sizes.rows, 1, randn)
    yield _attention("paged_attention_prefill", sizes, 1, sizes.chunk_tokens, randn)
    yield _rope(sizes, randn)
    yield _norm(sizes, randn)
    yield _head(sizes, randn)
    yield from _sampling(sizes, randn)


def _attention(
    name: str, sizes: Sizes, rows: int, counts: int, randn: Callable[..., torch.Tensor]
) -> Case:
    blocks = sizes.context_tokens // BLOCK_TOKENS
    cache = randn(rows * blocks, 2, sizes.kv_heads, BLOCK_TOKENS, sizes.head_dim)
    query = randn(rows * counts, sizes.heads, sizes.head_dim)
    order = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    first = np.full(rows, sizes.context_tokens - counts)
    offsets, starts, tables = (
        torch.from_numpy(one).to(query.device, torch.int32)
        for one in (np.arange(rows + 1) * counts, first, order)
    )
    paged = PagedRows(offsets, starts, tables, count_max=counts)
    mask = torch.ones(counts, sizes.context_tokens, dtype=torch.bool, device=query.device)
    mask = mask.tril(sizes.context_tokens - counts)

    def peer() -> torch.Tensor:
        """Gather the context, then attend, because torch has no paged attention."""
        context = cache[tables.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, R, K, C, D]
        if counts == 1:  # the query heads that share a KV head take the place of query tokens
            asked = query.view(rows, sizes.kv_heads, -1, sizes.head_dim)
            return F.scaled_dot_product_attention(asked, context[0], context[1]).view_as(query)
        asked = query.view(rows, counts, *query.shape[1:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            asked, context[0], context[1], attn_mask=mask, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    rule = AttentionRule(scale=sizes.head_dim**-0.5)
    seen = int(mask.sum()) * rows
    return Case(
        name,
        lambda: paged_attention_triton(query, cache, paged, rule),
        peer,
        moved_bytes=_bytes(cache, query, query),
        flops=4 * seen * sizes.heads * sizes.head_dim,
    )


def _rope(sizes: Sizes, randn: Callable[..., torch.Tensor]) -> Case:
    tokens, kv_heads = sizes.chunk_tokens, sizes.kv_heads
    qkv = randn(tokens, sizes.heads + 2 * kv_heads, sizes.head_dim)
    cache = randn(tokens, 2, kv_heads, BLOCK_TOKENS, sizes.head_dim)
    frequencies = 1e4 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    table = rope_table(frequencies, tokens, sizes.dtype).to(qkv.device)
    positions = torch.arange(tokens, device=qkv.device)
    slots = torch.randperm(tokens * BLOCK_TOKENS, device=qkv.device)[:tokens]

    def peer() -> torch.Tensor:
        rotations = table[positions]
        turned = apply_rope(qkv[:, :-kv_heads], rotations[:, :1], rotations[:, 1:])
        stored = torch.stack([turned[:, -kv_heads:], qkv[:, -kv_heads:]], 1)
        cache[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS] = stored
        return turned[:, :-kv_heads]

    return Case(
        "rope_write",
        lambda: rope_write_triton(qkv, cache, table=table, positions=positions, slots=slots),
        peer,
        moved_bytes=2 * _bytes(qkv),
        flops=0,
    )


def _norm(sizes: Sizes, randn: Callable[..., torch.Tensor]) -> Case:
    total, update = randn(sizes.chunk_tokens, sizes.hidden), randn(sizes.chunk_tokens, sizes.hidden)
    weight, others = randn(sizes.hidden), total.clone()
    return Case(
        "residual_norm",
        lambda: residual_norm_triton(total, update, weight, 1e-5),
        lambda: rms_norm(others.add_(update), weight, 1e-5),
        moved_bytes=4 * _bytes(total),
        flops=0,
    )


def _head(sizes: Sizes, randn: Callable[..., torch.Tensor]) -> Case:
    hidden, head = randn(sizes.scored_tokens, sizes.hidden), randn(sizes.vocab, sizes.hidden)
    head *= sizes.hidden**-0.5
    token_ids = torch.randint(0, sizes.vocab, (sizes.scored_tokens,), device=hidden.device)

    def peer() -> torch.Tensor:
        """Compute logits in the weights' dtype, and their log-softmax in float32."""
        logprobs = torch.log_softmax((hidden @ head.t()).float(), -1)
        return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)

    return Case(
        "head_logprobs",
        lambda: head_logprobs_triton(hidden, head, token_ids),
        peer,
        moved_bytes=_bytes(hidden, head),
        flops=2 * sizes.scored_tokens * sizes.vocab * sizes.hidden,
    )


def _sampling(sizes: Sizes, randn: Callable[..., torch.Tensor]) -> Iterator[Case]:
    logits = 3 * randn(sizes.rows, sizes.vocab).float()
    for name, top_k, top_p in (("unlimited", 0, 1.0), ("top_k_top_p", 50, 0.95)):

        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((sizes.rows,), value, dtype=dtype, device=logits.device)

        columns = SamplingColumns(
            temperature=column(0.8),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p),
            min_p=column(0.0),
            uniforms=column(0.37, torch.float64),
        )
        yield Case(
            f"fused_sample_{name}",
            lambda columns=columns: fused_sample_triton(logits, columns)[1],  # type: ignore[misc]
            lambda k=top_k, p=top_p: _sample(logits / 0.8, k, p, 0.37),  # type: ignore[misc]
            moved_bytes=_bytes(logits),
            flops=0,
        )


def _sample(logits: torch.Tensor, top_k: int, top_p: float, uniform: float) -> torch.Tensor:
    """Sort, filter, and search the cumulative sum; return log-probabilities [S]."""
    if top_k:
        ranked = logits.topk(min(top_k, logits.shape[-1])).values
        probabilities = torch.softmax(ranked, -1)
        kept = probabilities.cumsum(-1) - probabilities < top_p
        lowest = ranked.gather(-1, kept.sum(-1, keepdim=True) - 1)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return logprobs.gather(-1, tokens).squeeze(-1)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates that this GPU reaches."""

    bytes_per_us: float
    flops_per_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(table.Row):
    """A kernel's time; the peer is torch's own operations, and the ratio theirs over ours."""

    spread: float
    """Interquartile range of our times, as a share of their median."""
    roofline_share: float
    """Minimum time of the bytes and operations, at the rates of :func:`rates`, over ours."""
    error_max: float
    """Largest difference from torch's result."""
    device: str
    torch: str


def times_us(work: Callable[[], torch.Tensor], device: str = "cuda") -> list[float]:
    """Return the GPU time of each run, with a cold cache; on a CPU the wall time of a few."""
    if device == "cpu":
        return [_wall_us(work) for _ in range(CPU_RUNS)]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(WARMUP_RUNS):
        work()
    marks = [(_mark(), _mark()) for _ in range(RUNS)]
    for begun, ended in marks:
        flush.zero_()
        begun.record()
        work()
        ended.record()
    torch.cuda.synchronize()
    return [1e3 * begun.elapsed_time(ended) for begun, ended in marks]


def _wall_us(work: Callable[[], torch.Tensor]) -> float:
    began_s = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began_s)


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates(device: str = "cuda", dtype: torch.dtype = REAL.dtype) -> Rates:
    """Measure a device's copy and GEMM rates."""
    copied_bytes, side = (2**24, 256) if device == "cpu" else (COPY_BYTES, GEMM_SIDE)
    source = torch.zeros(copied_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_us = statistics.median(times_us(lambda: target.copy_(source), device))
    matrix = torch.randn(side, side, device=device).to(dtype)
    gemm_us = statistics.median(times_us(lambda: matrix @ matrix, device))
    return Rates(2 * copied_bytes / copy_us, 2 * side**3 / gemm_us)


def measure(case: Case, limits: Rates, device: str = "cuda") -> Row:
    """Compare the results, then time both."""
    error_max = float((case.ours().float() - case.peer().float()).abs().max())
    ours, peer = times_us(case.ours, device), statistics.median(times_us(case.peer, device))
    value = statistics.median(ours)
    low, _, high = statistics.quantiles(ours, n=4)
    least = max(case.moved_bytes / limits.bytes_per_us, case.flops / limits.flops_per_us)
    return Row(
        name=case.name,
        value=value,
        unit="us",
        peer=peer,
        ratio=peer / value,
        spread=(high - low) / value,
        roofline_share=least / value,
        error_max=error_max,
        device=device if device == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
    )
