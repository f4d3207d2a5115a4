import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernel_cases import TINY, cases

pytestmark = pytest.mark.wire


def test_each_kernel_case_equals_torchs_result() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = []
    for case in cases(TINY, device):
        names.append(case.name)
        torch.testing.assert_close(case.ours(), case.peer(), rtol=1e-4, atol=1e-4)
        assert case.moved_bytes > 0
    assert len(names) == len(set(names)) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU that is here")
def test_without_a_gpu_the_benchmark_says_so_and_ends_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees none here" in done.stderr
