import pytest
import torch

from tidegate.kernels.norm import rms_norm
from tidegate.kernels.residual_norm import (
    residual_norm_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def residual_norm_reference(
    total: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    *,
    gemma: bool = False,
) -> torch.Tensor:
    """Reference of :func:`residual_norm_triton` in torch. Slow and obviously right."""
    if update is not None:
        total.add_(update)
    wide = total.float()
    unit = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if gemma:
        return (unit * (1.0 + weight.float())).to(total.dtype)
    return unit.to(total.dtype) * weight


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Triton's interpreter cuts bfloat16 off where a GPU and torch round; at most twice.
    tolerance = 2e-6 if actual.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 64), (17, 96), (5, 2049)])
def test_the_sum_is_stored_and_normed_as_the_reference_does(
    tokens: int, width: int, gemma: bool, dtype: torch.dtype
) -> None:
    total, update, weight = randoms((tokens, width), (tokens, width), (width,), dtype=dtype)
    expected_total = total.clone()
    residual_norm_reference(expected_total, update, weight, 1e-5, gemma=gemma)

    normed = residual_norm_triton(total, update, weight, 1e-5, gemma=gemma)

    assert_close(total, expected_total)
    assert normed.dtype == dtype
    assert_close(normed, residual_norm_reference(total, None, weight, 1e-5, gemma=gemma))


@pytest.mark.parametrize("weight_shape", [(32,), (3, 32)])
def test_heads_are_normed_within_a_wider_tensor_without_touching_it(
    weight_shape: tuple[int, ...],
) -> None:
    wide, weight = randoms((7, 5, 32), weight_shape, dtype=torch.float32)
    before = wide.clone()

    normed = residual_norm_triton(wide[:, :3], None, weight, 1e-5)

    assert torch.equal(wide, before)
    assert_close(normed, rms_norm(wide[:, :3], weight, 1e-5))


def test_without_an_update_it_is_the_cpu_engines_norm() -> None:
    total, weight = randoms((9, 64), (64,), dtype=torch.bfloat16)

    for function in (residual_norm_reference, residual_norm_triton):
        assert_close(function(total, None, weight, 1e-6), rms_norm(total, weight, 1e-6))


def test_shapes_that_do_not_fit_are_refused() -> None:
    total, update, weight = randoms((3, 8), (3, 9), (8,), dtype=torch.float32)

    with pytest.raises(ValueError, match="update must be contiguous"):
        residual_norm_triton(total, update, weight, 1e-5)
    with pytest.raises(ValueError, match=r"got \[3, 8\] and \[9\]"):
        residual_norm_triton(total, None, update[0], 1e-5)
    with pytest.raises(ValueError, match="must be contiguous"):
        residual_norm_triton(total.t(), None, weight[:3], 1e-5)
