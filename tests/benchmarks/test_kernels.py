import pytest
import torch

from benchmarks.kernels import TINY, cases

pytestmark = pytest.mark.wire


def test_each_kernel_case_equals_torchs_result() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = []
    for case in cases(TINY, device):
        names.append(case.name)
        torch.testing.assert_close(case.ours(), case.peer(), rtol=1e-4, atol=1e-4)
        assert case.moved_bytes > 0
    assert len(names) == len(set(names)) == 7
