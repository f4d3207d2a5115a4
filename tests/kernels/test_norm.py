import pytest
import torch

from tidegate.kernels.norm import rms_norm, rms_norm_plus_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (5, 3, 32)])
def test_rows_are_divided_by_their_root_mean_square_and_weighted(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[1:], generator=generator).to(dtype)  # per head, as for q and k

    normed = rms_norm(x, weight, 1e-5)

    wide = x.float()
    unit = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, unit.to(dtype) * weight)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 0.501 * 2**-7)],  # one rounding to 8 bits, not two
)
def test_the_weight_of_the_other_norm_counts_from_one_and_is_rounded_last(
    dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 64, generator=generator).to(dtype)
    weight = torch.randn(64, generator=generator).to(dtype)

    normed = rms_norm_plus_one(x, weight, 1e-5)

    wide = x.double()
    unit = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert normed.dtype == dtype
    expected = unit * (1 + weight.double())
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=1e-6)
