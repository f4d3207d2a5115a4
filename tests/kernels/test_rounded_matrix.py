"""Products of int8 and fp8 matrices, by compiled code and by torch, and their rounding."""

import pytest
import torch

from tidegate.kernels.compiled import library
from tidegate.kernels.rounded_matrix import Fp8Matrix, Int8Matrix, rounded
from tidegate.kernels.weight_matrix import COPY_ELEMENTS

SIZES = [(1, 1), (15, 7), (16, 16), (33, 513), (64, 40), (97, 1030), (600, 1030)]
"""Outputs and inputs, on both sides of the borders of panels and of blocks of inputs; the last has
more rows than are widened at a time."""

TOKENS = [1, 2, 3, 7, 32, 129]


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["int8 compiled", "int8 by torch", "fp8"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "int8 compiled" and library() is None:
        pytest.skip("no C++ compiler: engines multiply by torch's code here")
    return str(request.param)


def matrix_of(
    weights: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32
) -> Int8Matrix | Fp8Matrix:
    outputs, inputs = weights.shape
    matrix: Int8Matrix | Fp8Matrix
    if kind == "fp8":
        matrix = Fp8Matrix(outputs, inputs, dtype)
    else:
        compiled = library() if kind == "int8 compiled" else None
        matrix = Int8Matrix(outputs, inputs, dtype, compiled)
    matrix.rows(0, outputs).copy_(weights)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_is_that_of_the_rounded_weights(
    dtype: torch.dtype, kind: str, outputs: int, inputs: int
) -> None:
    assert outputs * inputs < COPY_ELEMENTS or (outputs, inputs) == SIZES[-1]
    weights, bias = torch.randn(outputs, inputs), torch.randn(outputs).to(dtype)
    matrix = matrix_of(weights, kind, dtype)
    numbers, steps = rounded(weights, matrix.number_dtype)
    exact_weights = numbers.double() * steps.double()[:, None]
    limit = 5e-6 if dtype == torch.float32 else 2**-8
    for tokens in TOKENS:
        x, total = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
        exact = x.double() @ exact_weights.T + bias.double()
        near = {"atol": limit * inputs**0.5, "rtol": limit}
        torch.testing.assert_close(matrix.linear(x, bias).double(), exact, **near)
        exact += total.double()
        matrix.add_linear_(total, x, bias)
        torch.testing.assert_close(total.double(), exact, **near)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_no_weight_loses_more_than_its_format_must_lose(
    kind: str, outputs: int, inputs: int
) -> None:
    weights = torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]
    largest = weights.abs().amax(-1, keepdim=True)
    if kind == "fp8":  # a sixteenth of itself, or of the smallest normal number
        limit = 1.00001 * torch.maximum(weights.abs(), largest / 448 * 2**-6) / 16
    else:  # half a step of its output
        limit = 0.5001 * largest / 127
    assert ((matrix_of(weights, kind).unpacked() - weights).abs() <= limit).all()


def test_what_was_rounded_once_is_not_rounded_again(kind: str) -> None:
    once = matrix_of(torch.randn(33, 100), kind).unpacked()
    torch.testing.assert_close(matrix_of(once, kind).unpacked(), once, rtol=3e-7, atol=0.0)


def test_outputs_without_any_weight_stay_zero(kind: str) -> None:
    assert matrix_of(torch.zeros(5, 9), kind).linear(torch.randn(2, 9)).eq(0).all()


def test_a_tokens_outputs_are_the_same_bits_in_every_batch() -> None:
    if library() is None:
        pytest.skip("no C++ compiler: torch's sums depend on the batch")
    matrix = matrix_of(torch.randn(97, 1030), "int8 compiled")
    x = torch.randn(129, 1030)
    together = matrix.linear(x)
    for tokens in (1, 2, 6, 13):
        assert torch.equal(matrix.linear(x[:tokens]), together[:tokens])


def test_a_quarter_of_the_memory_is_taken_and_all_of_it_is_reported(kind: str) -> None:
    matrix = matrix_of(torch.randn(64, 512), kind)
    assert matrix.storage.nbytes == 64 * 512 + 64 * 4
    assert matrix.rows(3, 5).storages() == [matrix.storage]  # type: ignore[union-attr]


def test_some_rows_are_replaced_and_others_stay(kind: str) -> None:
    matrix = matrix_of(torch.randn(40, 12), kind)
    before, new = matrix.unpacked(), torch.randn(9, 12)
    matrix.rows(10, 9).copy_(new)
    after = matrix.unpacked()
    assert torch.equal(after[:10], before[:10])
    assert torch.equal(after[19:], before[19:])
    relative = 1 / 15 if kind == "fp8" else 0
    torch.testing.assert_close(after[10:19], new, rtol=relative, atol=0.02)


def test_rows_of_another_shape_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="is not the shape of 2 rows"):
        matrix_of(torch.randn(4, 3), kind).rows(0, 2).copy_(torch.zeros(3, 3))
