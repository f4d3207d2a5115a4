import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wire

SHARED_BYTES_MAX = 227 * 1024
"""Shared memory of one program on an H100. compile_kernels.py also supports the A100 (163 KB)
and MI300 (64 KB)."""

KERNELS = {
    "_attend_kernel",
    "_merge_kernel",
    "_rope_write_kernel",
    "_residual_norm_kernel",
    "_head_logprobs_kernel",
    "_sample_kernel",
}


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h100_and_fits_into_its_shared_memory(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", "h100", "bfloat16"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=Path(__file__).parents[2],
        env=environment,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in compiled} == KERNELS
    assert max(line["shared_bytes"] for line in compiled) <= SHARED_BYTES_MAX
