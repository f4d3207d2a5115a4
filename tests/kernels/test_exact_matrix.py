import shlex
import shutil
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tidegate.kernels.compiled import COMPILER
from tidegate.kernels.exact_matrix import ExactMatrix, make_exact_matrix
from tidegate.kernels.weight_matrix import take_over

pytestmark = pytest.mark.skipif(
    shutil.which(shlex.split(COMPILER)[0]) is None,
    reason=f"no {COMPILER}: engines multiply by torch's code here",
)

SIZES = [(1, 1), (15, 7), (33, 513), (64, 40), (97, 1030), (300, 64)]
"""Outputs and inputs, on both sides of the borders of panels and of blocks of inputs."""


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def numbers(outputs: int, inputs: int) -> torch.Tensor:
    """Return weights of which some panels are exact in bfloat16, and others only partly or not."""
    weights = torch.randn(outputs, inputs)
    weights[: outputs // 3] = weights[: outputs // 3].bfloat16().float()
    return weights


def exact(weights: torch.Tensor) -> ExactMatrix:
    matrix = make_exact_matrix(weights.shape[0], weights.shape[1], torch.bfloat16, is_packed=True)
    assert isinstance(matrix, ExactMatrix)
    matrix.rows(0, weights.shape[0]).copy_(weights)
    return matrix


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_those_of_double_precision_whatever_panels_lie_as(
    outputs: int, inputs: int
) -> None:
    weights, bias = numbers(outputs, inputs), torch.randn(outputs)
    for held in (weights, weights.bfloat16().float()):
        matrix = exact(held)
        for tokens in (1, 2, 5, 13, 129):
            x = torch.randn(tokens, inputs).bfloat16()
            sums = F.linear(x.double(), held.double(), bias.double())
            actual = matrix.linear(x, bias)
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual.double(), sums, atol=2e-6 * inputs**0.5, rtol=2e-6)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_what_is_packed_comes_back_to_the_bit_whatever_was_there_before(
    outputs: int, inputs: int
) -> None:
    matrix, x = exact(torch.randn(outputs, inputs)), torch.randn(3, inputs).bfloat16()
    for weights in (
        numbers(outputs, inputs),
        torch.ones(outputs, inputs),
        numbers(outputs, inputs),
    ):
        cuts = [0, outputs // 3, outputs // 2, outputs]
        for first, end in reversed(list(pairwise(cuts))):
            matrix.rows(first, end - first).copy_(weights[first:end])
        assert torch.equal(matrix.unpacked(), weights)

        other = exact(torch.zeros(outputs, inputs))
        take_over(other.rows(0, outputs), matrix.rows(0, outputs))
        assert torch.equal(other.unpacked(), weights)
        assert torch.equal(other.linear(x), matrix.linear(x))


def test_a_token_comes_out_bit_for_bit_the_same_in_every_batch() -> None:
    matrix, x = exact(numbers(300, 1100)), torch.randn(150, 1100).bfloat16()
    among_all = matrix.linear(x)
    for tokens in range(1, 20):
        some = slice(7 * (tokens - 1), 7 * (tokens - 1) + tokens)
        assert torch.equal(matrix.linear(x[some]), among_all[some])


def test_weights_published_in_bfloat16_take_half_the_memory() -> None:
    matrix, room = exact(torch.zeros(64, 512)), 64 * 512
    matrix.storage[:room] = torch.nan
    matrix.rows(0, 64).copy_(torch.randn(64, 512).bfloat16())
    assert int(matrix.storage[:room].isnan().sum()) == room // 2
