import torch

from tidegate.kernels.rope import apply_rope, rope_table


def test_each_pair_of_coordinates_is_turned_by_position_times_its_frequency_and_stretched() -> None:
    frequencies = torch.tensor([1.0, 0.25])
    table = rope_table(frequencies, 6, torch.float32, amplitude=1.5)
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))

    turned = apply_rope(x, table[:, :1], table[:, 1:])

    points = torch.complex(x[..., :2], x[..., 2:])
    angles = torch.arange(6.0)[:, None, None] * frequencies
    expected = points * torch.polar(torch.full_like(angles, 1.5), angles)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1))
