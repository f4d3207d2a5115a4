import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import COMPILER
from tidegate.kernels.native import (
    HEAD_DIMS,
    LastTokens,
    Native,
    SlotMapping,
    native,
    swigluoai,
)
from tidegate.kernels.norm import rms_norm, rms_norm_plus_one
from tidegate.kernels.rope import apply_rope, rope_table
from tidegate.kernels.sampling import sample
from tidegate.kernels.uniforms import GOLDEN_GAMMA, uniforms

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        shutil.which(shlex.split(COMPILER)[0]) is None,
        reason=f"no {COMPILER}: engines compute by torch's code here",
    ),
]

DTYPES = [torch.float32, torch.bfloat16]

EPSILON = 1e-6

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""torch's functions of the activations, by transformers' names."""

SEEN = [
    (None, None, None),
    (3, None, None),
    (20, None, None),
    (None, 2.0, None),
    (None, None, torch.tensor([-80.0, 0.0, 1.0, 4.0, 80.0])),
    (3, 2.0, torch.tensor([3.0, -1.0, 0.5, 9.0, 0.0])),
]
"""Windows, soft caps, and each head's sink."""


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def compiled(
    dtype: torch.dtype, activation: str = "silu", *, norm_adds_one: bool = False
) -> Native:
    found = native(dtype, activation, norm_adds_one=norm_adds_one)
    assert found is not None
    return found


def tolerance(dtype: torch.dtype) -> float:
    """Tolerance for numbers about 1: a few roundings of float32, or one of bfloat16."""
    return 4e-6 if dtype == torch.float32 else 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 65, 512])
@pytest.mark.parametrize("norm", [rms_norm, rms_norm_plus_one])
def test_a_norm_is_torchs(dtype: torch.dtype, size: int, norm: Norm) -> None:
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    functions = compiled(dtype, norm_adds_one=norm is rms_norm_plus_one)
    actual, reference = functions.norm(x, weight, EPSILON), norm(x, weight, EPSILON)
    torch.testing.assert_close(actual, reference, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 9, 192])
@pytest.mark.parametrize("activation", [*TORCH, "swigluoai"])
def test_a_gate_is_torchs_however_large_its_numbers(
    dtype: torch.dtype, inner: int, activation: str
) -> None:
    scales = torch.tensor([1e-3, 1, 10, 80, 200, 1e4])[:, None]
    gate_up = (torch.randn(6, 2 * inner) * scales).to(dtype)
    actual = compiled(dtype, activation).gate(gate_up)
    if activation == "swigluoai":  # its limits lie within these numbers
        reference = swigluoai(gate_up.double()).to(dtype)
    else:
        gate, up = gate_up.chunk(2, -1)
        reference = TORCH[activation](gate.double()).to(dtype) * up
    torch.testing.assert_close(actual, reference, atol=1e-6, rtol=4 * tolerance(dtype))


@pytest.mark.parametrize("activation", TORCH)
def test_a_gate_is_accurate_to_float32_over_its_whole_range(activation: str) -> None:
    gate = torch.cat([torch.linspace(-12, 12, 100_001), torch.logspace(-30, 0, 1000)])
    actual = compiled(torch.float32, activation).gate(
        torch.stack([gate, torch.ones_like(gate)]).T.contiguous()
    )
    exact = TORCH[activation](gate.double())
    error = (actual.squeeze(1).double() - exact).abs()
    assert (error / gate.abs().clamp(min=1e-30)).max() < 3e-7  # of a float32's 6e-8 for 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 8), (6, 1, 64)])
@pytest.mark.parametrize("norm", [rms_norm, rms_norm_plus_one, None])
def test_queries_are_turned_and_keys_and_values_stand_where_they_belong(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, norm: Norm | None
) -> None:
    tokens, block_tokens = 7, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    weight = torch.randn(heads + kv_heads, head_dim).to(dtype) if norm else None
    table = rope_table(1.0 / 1e4 ** torch.linspace(0, 1, head_dim // 2), 40, dtype)
    positions = torch.tensor([0, 39, 3, 4, 5, 17, 1])
    places = torch.randperm(6 * block_tokens)[:tokens]
    blocks, offsets = places // block_tokens, places % block_tokens
    cache = torch.full((6, 2, kv_heads, block_tokens, head_dim), 7.0, dtype=dtype)
    untouched = cache.clone()

    query = compiled(dtype, norm_adds_one=norm is rms_norm_plus_one).rotate_and_write(
        qkv, weight, table, SlotMapping(positions, blocks, offsets), cache, EPSILON
    )

    turned = qkv[:, : heads + kv_heads]
    turned = norm(turned, weight, EPSILON) if norm and weight is not None else turned
    turned = apply_rope(turned, table[positions, :1], table[positions, 1:])

    def assert_close(actual: torch.Tensor, reference: torch.Tensor) -> None:
        near = 4 * tolerance(dtype)
        torch.testing.assert_close(actual, reference, atol=near, rtol=near)

    assert_close(query, turned[:, :heads])
    for t, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        assert_close(cache[block, 0, :, offset], turned[t, heads:])
        assert torch.equal(cache[block, 1, :, offset], qkv[t, heads + kv_heads :])
        untouched[block, :, :, offset] = cache[block, :, :, offset]
    assert torch.equal(cache, untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("block_tokens", [4, 20])  # fewer than fill a vector, and more
def test_the_last_token_attends_to_its_context_and_nothing_else(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, block_tokens: int
) -> None:
    lengths, scale = torch.tensor([1, 4, 5, 33]), head_dim**-0.5
    tables = torch.randperm(4 * 9).view(4, 9)
    cache = torch.full((36, 2, kv_heads, block_tokens, head_dim), 1e4, dtype=dtype)
    query = torch.randn(4, heads, head_dim).to(dtype)
    contexts = [torch.randn(2, kv_heads, length, head_dim).to(dtype) for length in lengths]
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context.shape[2]):
            block, offset = table[position // block_tokens], position % block_tokens
            cache[block, :, :, offset] = context[:, :, position]
    for window, soft_cap, sinks in SEEN:
        sinks = None if sinks is None else sinks[:heads]
        group = LastTokens(0, 4, tables, lengths, window)
        actual = compiled(dtype).attend_last(
            query, cache, group, scale=scale, soft_cap=soft_cap, sinks=sinks
        )
        expected = torch.stack(
            [
                attended(q.float(), context[:, :, -(window or 0) :].float(), scale, soft_cap, sinks)
                for q, context in zip(query, contexts, strict=True)
            ]
        )
        torch.testing.assert_close(actual.float(), expected, atol=tolerance(dtype), rtol=0.02)


def attended(
    query: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return one token's heads [A, D] over the keys and values [2, K, C, D] that it attends to."""
    keys, values = context.repeat_interleave(len(query) // context.shape[1], 1)
    scores = (keys @ query[:, :, None]).squeeze(-1) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], -1)
    shares = torch.softmax(scores, -1)[:, : keys.shape[1]]
    mixed: torch.Tensor = shares[:, None] @ values
    return mixed.flatten()


@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 3000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 700, 10_000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_a_draw_is_the_samplers(vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    rows = 64
    logits = torch.randn(rows, vocab) * 3
    chance = np.random.default_rng(0)
    seeds, indices = chance.integers(0, 2**64, rows, np.uint64), np.arange(rows, dtype=np.uint64)
    temperatures = np.full(rows, temperature, np.float32)
    limits = np.full(rows, top_k, np.int64), np.full(rows, top_p, np.float32)
    ids, logprobs = map(
        torch.from_numpy,
        compiled(torch.float32).draw(logits, temperatures, *limits, seeds, indices),
    )
    expected, expected_logprobs = sample(logits, temperatures, *limits, uniforms(seeds, indices))
    # Where a uniform falls within a rounding of the border of two tokens, either is right.
    assert (ids == expected).sum() >= rows - 1
    same = ids == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], atol=5e-6, rtol=1e-5)


def seed_of_almost_one() -> int:
    """Return the seed whose first number is the largest of all, by inverting the generator."""

    def unscrambled(x: int) -> int:
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            whole = x
            for _ in range(64 // shift):
                whole = x ^ (whole >> shift)
            x = whole * pow(factor, -1, 2**64) % 2**64
        return x

    gamma = int(GOLDEN_GAMMA)
    return (unscrambled((unscrambled(2**64 - 1) - gamma) % 2**64) - gamma) % 2**64


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.5), (3, 1.0), (590, 0.9)])
def test_extremes_draw_a_token_that_is_possible_and_nothing_crashes(
    top_k: int, top_p: float
) -> None:
    logits = torch.full((5, 600), -torch.inf)
    logits[0, 599] = logits[1, 0] = logits[2, 300] = 0.0
    logits[3] = torch.nan
    logits[4, 100:] = 3e38
    seeds, first = np.full(5, seed_of_almost_one(), np.uint64), np.zeros(5, np.uint64)
    assert uniforms(seeds, first).tolist() == 5 * [1.0 - 2.0**-53]
    limits = np.full(5, top_k, np.int64), np.full(5, top_p, np.float32)
    ones = np.ones(5, np.float32)
    ids, logprobs = compiled(torch.float32).draw(logits, ones, *limits, seeds, first)
    assert ids[:3].tolist() == [599, 0, 300]
    assert logprobs[:3].tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(logprobs[3])
    assert (ids >= 0).all()
    assert (ids < 600).all()


COMPILE = "import torch; from tidegate.kernels.native import native; print(native(torch.float32))"


def compile_in(cache: Path, compiler: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": compiler}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_engines_that_start_together_all_load_a_complete_library(tmp_path: Path) -> None:
    quick = tmp_path / "compiler"  # a third of the time: the library itself is tested elsewhere
    quick.write_text(f'#!/bin/sh\nexec {COMPILER} $(echo "$@" | sed s/-O3/-O0/)\n')
    quick.chmod(0o755)
    engines = [compile_in(tmp_path, str(quick)) for _ in range(2)]
    assert all("Native object" in engine.communicate(timeout=150)[0] for engine in engines)
    assert len(list((tmp_path / "tidegate").iterdir())) == 1


@pytest.mark.parametrize("compiler", ["there-is-none", "false"])
def test_without_a_compiler_there_is_no_library_and_no_error(tmp_path: Path, compiler: str) -> None:
    engine = compile_in(tmp_path, compiler)
    assert engine.communicate(timeout=150)[0].strip() == "None"
    assert engine.returncode == 0
