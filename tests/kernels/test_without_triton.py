import subprocess
import sys

import pytest

pytestmark = pytest.mark.wire

HIDDEN = "import sys; sys.modules['triton'] = None\n"
"""Makes every import of Triton fail, as if it was not installed."""

CPU = """
import torch
import tidegate.engine.worker
from tidegate.errors import TritonMissing
from tidegate.kernels import fused_sampling, head_logprobs, paged_attention, rope_write
from tidegate.kernels.norm import rms_norm
from tidegate.kernels.residual_norm import residual_norm_triton

x = torch.ones(2, 8)
print(rms_norm(x, x[0], 1e-6).tolist())
try:
    residual_norm_triton(x, None, x[0], 1e-6)
except TritonMissing as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


def test_without_triton_the_cpu_works_and_a_kernel_launch_names_the_package() -> None:
    norms, message = run(HIDDEN + CPU).splitlines()

    assert norms.startswith("[[0.9999")
    assert "_residual_norm_kernel runs on a GPU by Triton" in message
    assert "pip install 'tidegate[gpu]'" in message


def test_an_engine_on_a_cpu_does_not_load_triton_even_if_it_is_there() -> None:
    assert run("import tidegate.engine.worker, sys; print('triton' in sys.modules)") == "False\n"
