"""Products of fp8 matrices, and their rounding."""

import pytest
import torch

from tidegate.kernels.rounded_matrix import Fp8Matrix, rounded_to_e4m3
from tidegate.kernels.weight_matrix import COPY_ELEMENTS

SIZES = [(1, 1), (15, 7), (33, 513), (600, 1030)]
"""Outputs and inputs; the last has more rows than are widened at a time."""


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def matrix_of(weights: torch.Tensor, dtype: torch.dtype = torch.float32) -> Fp8Matrix:
    outputs, inputs = weights.shape
    matrix = Fp8Matrix(outputs, inputs, dtype)
    matrix.rows(0, outputs).copy_(weights)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_is_that_of_the_rounded_weights(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    assert outputs * inputs < COPY_ELEMENTS or (outputs, inputs) == SIZES[-1]
    weights, bias = torch.randn(outputs, inputs), torch.randn(outputs).to(dtype)
    numbers, steps = rounded_to_e4m3(weights)
    matrix = matrix_of(weights, dtype)
    limit = 5e-6 if dtype == torch.float32 else 2**-8
    near = {"atol": limit * inputs**0.5, "rtol": limit}
    for tokens in (1, 7, 33):
        x, total = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
        exact = x.double() @ (numbers.double() * steps.double()[:, None]).T + bias.double()
        torch.testing.assert_close(matrix.linear(x, bias).double(), exact, **near)
        matrix.add_linear_(total_after := total.clone(), x, bias)
        torch.testing.assert_close(total_after.double(), exact + total.double(), **near)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_no_weight_loses_more_than_a_sixteenth_of_itself_or_of_the_smallest_normal_one(
    outputs: int, inputs: int
) -> None:
    weights = torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]
    smallest = weights.abs().amax(-1, keepdim=True) / 448 * 2**-6
    lost = (matrix_of(weights).unpacked() - weights).abs()
    assert (lost <= 1.00001 * torch.maximum(weights.abs(), smallest) / 16).all()


def test_what_was_rounded_once_is_not_rounded_again() -> None:
    once = matrix_of(torch.randn(33, 100)).unpacked()
    torch.testing.assert_close(matrix_of(once).unpacked(), once, rtol=3e-7, atol=0.0)


def test_outputs_without_any_weight_stay_zero() -> None:
    assert matrix_of(torch.zeros(5, 9)).linear(torch.randn(2, 9)).eq(0).all()


def test_a_quarter_of_the_memory_is_taken_and_all_of_it_is_reported() -> None:
    matrix = matrix_of(torch.randn(64, 512))
    assert matrix.storage.nbytes == 64 * 512 + 64 * 4
    assert matrix.rows(3, 5).storages() == [matrix.storage]  # type: ignore[union-attr]


def test_some_rows_are_replaced_and_others_stay() -> None:
    matrix = matrix_of(torch.randn(40, 12))
    before, new = matrix.unpacked(), torch.randn(9, 12)
    matrix.rows(10, 9).copy_(new)
    after = matrix.unpacked()
    assert torch.equal(after[:10], before[:10])
    assert torch.equal(after[19:], before[19:])
    torch.testing.assert_close(after[10:19], new, rtol=1 / 15, atol=0.01)


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="is not the shape of 2 rows"):
        matrix_of(torch.randn(4, 3)).rows(0, 2).copy_(torch.zeros(3, 3))
