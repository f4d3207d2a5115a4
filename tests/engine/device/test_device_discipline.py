"""Steps on a fake device: no transfers to the host, and few kernel variants that fit an H100."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wire

SHARED_BYTES_MAX = 227 * 1024
"""Shared memory of one program on an H100."""

VARIANTS_MAX = 16
"""Compiled variants per kernel over the 14 steps of two models: fewer than one per batch."""

KERNELS = {
    "_attend_kernel",
    "_merge_kernel",
    "_rope_write_kernel",
    "_residual_norm_kernel",
    "_head_logprobs_kernel",
    "_sample_kernel",
}


def run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.device.steps_on_a_device", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[3],
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_steps_use_no_tensor_of_another_device_and_the_same_kernels_for_all_batches(
    tmp_path: Path,
) -> None:
    lines = run(tmp_path)

    assert {line["kernel"] for line in lines} == KERNELS
    assert all(line["variants"] <= VARIANTS_MAX for line in lines)
    launches = {line["kernel"]: line["launches"] for line in lines}
    assert launches["_attend_kernel"] > 2 * VARIANTS_MAX


@pytest.mark.skipif("TIDEGATE_COMPILE" not in os.environ, reason="run `make test-device`")
@pytest.mark.slow
def test_each_kernel_that_steps_ask_for_compiles_for_an_h100(tmp_path: Path) -> None:
    compiled = [line for line in run(tmp_path, "compile") if "shared_bytes" in line]

    assert {line["kernel"] for line in compiled} == KERNELS
    assert max(line["shared_bytes"] for line in compiled) <= SHARED_BYTES_MAX
