import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def compile_with(program: str, *arguments: str, cache: Path) -> list[dict[str, Any]]:
    """Run a program that compiles kernels without a GPU; return what it prints, a line each."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h100_and_fits_into_its_shared_memory(tmp_path: Path) -> None:
    compiled = compile_with("tests.kernels.compile_kernels", "h100", "bfloat16", cache=tmp_path)

    assert {line["kernel"] for line in compiled} == KERNELS
    assert max(line["shared_bytes"] for line in compiled) <= SHARED_BYTES_MAX
