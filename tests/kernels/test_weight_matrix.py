import shlex
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tidegate.kernels import weight_matrix
from tidegate.kernels.compiled import COMPILER
from tidegate.kernels.weight_matrix import (
    Matrix,
    PackedMatrix,
    PlainMatrix,
    make_matrix,
    packs,
)

pytestmark = pytest.mark.skipif(
    shutil.which(shlex.split(COMPILER)[0]) is None,
    reason=f"no {COMPILER}: engines multiply by torch's code here",
)

DTYPES = [torch.float32, torch.bfloat16]

SIZES = [(1, 1), (15, 7), (16, 16), (33, 513), (64, 40), (97, 1030)]
"""Outputs and inputs, on both sides of the borders of panels and of blocks of inputs."""

TOKENS = [1, 2, 3, 5, 6, 7, 32, 129]


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def packed(weights: torch.Tensor) -> Matrix:
    matrix = make_matrix(weights.shape[0], weights.shape[1], weights.dtype, is_packed=True)
    assert isinstance(matrix, PackedMatrix)
    matrix.rows(0, weights.shape[0]).copy_(weights)
    return matrix


def plain(weights: torch.Tensor) -> Matrix:
    matrix = make_matrix(weights.shape[0], weights.shape[1], weights.dtype, is_packed=False)
    assert isinstance(matrix, PlainMatrix)
    matrix.rows(0, weights.shape[0]).copy_(weights)
    return matrix


def assert_near(actual: torch.Tensor, exact: torch.Tensor, inputs: int) -> None:
    """Compare numbers of about sqrt(inputs), within some roundings of float32 and
    one of the dtype."""
    rounding = 2e-6 if actual.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, atol=rounding * inputs**0.5, rtol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [packed, plain])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_is_that_of_double_precision(
    dtype: torch.dtype, make: Callable[[torch.Tensor], Matrix], outputs: int, inputs: int
) -> None:
    weights, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    matrix = make(weights)
    for tokens in TOKENS:
        x, total = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
        exact = F.linear(x.double(), weights.double())
        assert_near(matrix.linear(x), exact, inputs)
        assert_near(matrix.linear(x, bias), exact + bias, inputs)
        for its_bias in (None, bias):
            added = total.clone()
            matrix.add_linear_(added, x, its_bias)
            whole = total.double() + exact + (0 if its_bias is None else its_bias)
            # torch rounds a sum of bfloat16 again before it adds the bias.
            assert_near(added, whole, 4 * inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_what_is_packed_comes_back_and_parts_may_come_in_any_order(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weights = torch.randn(outputs, inputs, dtype=torch.float64)
    matrix = make_matrix(outputs, inputs, dtype, is_packed=True)
    cuts = [0, outputs // 3, outputs // 2, outputs]
    for first, end in reversed(list(pairwise(cuts))):
        matrix.rows(first, end - first).copy_(weights[first:end])

    assert torch.equal(matrix.unpacked(), weights.to(dtype))
    some = torch.randint(0, outputs, (9,))
    assert torch.equal(matrix.take(some), weights.to(dtype)[some])


def test_activations_may_lie_in_another_order() -> None:
    weights, x = torch.randn(33, 2000), torch.randn(2000, 600)
    actual = packed(weights).linear(x.t())
    assert torch.equal(actual, packed(weights).linear(x.t().contiguous()))


def test_rows_of_another_shape_are_refused_before_anything_is_written() -> None:
    matrix = packed(torch.ones(8, 4))
    with pytest.raises(ValueError, match=r"\[2, 3\] is not the shape of 2 rows"):
        matrix.rows(0, 2).copy_(torch.zeros(2, 3))
    assert torch.equal(matrix.unpacked(), torch.ones(8, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_comes_out_bit_for_bit_the_same_in_every_batch(dtype: torch.dtype) -> None:
    weights, bias = torch.randn(100, 1100).to(dtype), torch.randn(100).to(dtype)
    matrix, x = packed(weights), torch.randn(150, 1100).to(dtype)
    among_all = matrix.linear(x, bias)
    for tokens in range(1, 20):
        first = 7 * (tokens - 1)
        some = slice(first, first + tokens)
        assert torch.equal(matrix.linear(x[some], bias), among_all[some])


def test_threads_share_the_work_and_change_no_bit() -> None:
    matrix, x = packed(torch.randn(700, 520)), torch.randn(40, 520)
    alone = matrix.linear(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(matrix.linear(x), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("flags", "is_packed"), [("avx512_bf16", True), ("amx_bf16", False)])
def test_bfloat16_is_packed_unless_the_processor_multiplies_tiles_of_it(
    flags: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_matrix, "processor", lambda: f"flags : fma avx512f {flags}\n")
    assert packs(torch.bfloat16) is is_packed


def test_what_fills_panels_up_changes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = partial(torch.full, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty", lambda numbers, dtype: garbage((numbers,), dtype=dtype))
    weights, x = torch.ones(40, 7, dtype=torch.bfloat16), torch.ones(3, 7, dtype=torch.bfloat16)
    assert torch.equal(packed(weights).linear(x), torch.full((3, 40), 7.0, dtype=torch.bfloat16))
