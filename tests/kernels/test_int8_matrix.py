"""Products of int8 matrices, by compiled code and by torch, and their rounding."""

import pytest
import torch

from tidegate.kernels.compiled import library
from tidegate.kernels.rounded_matrix import Int8Matrix, quantized

SIZES = [(1, 1), (15, 7), (16, 16), (33, 513), (64, 40), (97, 1030)]
"""Outputs and inputs, on both sides of the borders of panels and of blocks of inputs."""

TOKENS = [1, 2, 3, 7, 32, 129]


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["compiled", "torch"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    if request.param == "compiled" and library() is None:
        pytest.skip("no C++ compiler: engines multiply by torch's code here")
    return bool(request.param == "compiled")


def matrix_of(weights: torch.Tensor, dtype: torch.dtype, *, is_compiled: bool) -> Int8Matrix:
    outputs, inputs = weights.shape
    matrix = Int8Matrix(outputs, inputs, dtype, library() if is_compiled else None)
    matrix.rows(0, outputs).copy_(weights)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_is_that_of_the_rounded_weights(
    dtype: torch.dtype, is_compiled: bool, outputs: int, inputs: int
) -> None:
    weights, bias = torch.randn(outputs, inputs), torch.randn(outputs).to(dtype)
    rounded, steps = quantized(weights)
    exact_weights = rounded.double() * steps.double()[:, None]
    matrix = matrix_of(weights, dtype, is_compiled=is_compiled)
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
def test_no_weight_is_rounded_by_more_than_half_a_step_of_its_output(
    is_compiled: bool, outputs: int, inputs: int
) -> None:
    weights = torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None]
    matrix = matrix_of(weights, torch.float32, is_compiled=is_compiled)
    steps = weights.abs().amax(-1, keepdim=True) / 127
    assert ((matrix.unpacked() - weights).abs() <= 0.5001 * steps).all()


def test_what_was_rounded_once_is_not_rounded_again(is_compiled: bool) -> None:
    weights = torch.randn(33, 100)
    once = matrix_of(weights, torch.float32, is_compiled=is_compiled)
    twice = matrix_of(once.unpacked(), torch.float32, is_compiled=is_compiled)
    torch.testing.assert_close(twice.unpacked(), once.unpacked(), rtol=3e-7, atol=0.0)


def test_outputs_without_any_weight_stay_zero(is_compiled: bool) -> None:
    matrix = matrix_of(torch.zeros(5, 9), torch.float32, is_compiled=is_compiled)
    assert matrix.linear(torch.randn(2, 9)).eq(0).all()


def test_a_tokens_outputs_are_the_same_bits_in_every_batch() -> None:
    if library() is None:
        pytest.skip("no C++ compiler: torch's sums depend on the batch")
    matrix = matrix_of(torch.randn(97, 1030), torch.float32, is_compiled=True)
    x = torch.randn(129, 1030)
    together = matrix.linear(x)
    for tokens in (1, 2, 6, 13):
        assert torch.equal(matrix.linear(x[:tokens]), together[:tokens])


def test_a_quarter_of_the_memory_is_taken_and_all_of_it_is_reported(is_compiled: bool) -> None:
    matrix = matrix_of(torch.randn(64, 512), torch.float32, is_compiled=is_compiled)
    assert matrix.storage.nbytes == 64 * 512 + 64 * 4
    assert matrix.rows(3, 5).storages() == [matrix.storage]  # type: ignore[union-attr]


def test_some_rows_are_replaced_and_others_stay(is_compiled: bool) -> None:
    matrix = matrix_of(torch.randn(40, 12), torch.float32, is_compiled=is_compiled)
    before, new = matrix.unpacked(), torch.randn(9, 12)
    matrix.rows(10, 9).copy_(new)
    after = matrix.unpacked()
    assert torch.equal(after[:10], before[:10])
    assert torch.equal(after[19:], before[19:])
    torch.testing.assert_close(after[10:19], new, atol=0.02, rtol=0)
