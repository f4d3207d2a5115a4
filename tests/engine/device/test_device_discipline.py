"""Steps on a fake device: no transfers to the host, and few kernel variants that fit an H100."""

import os
from pathlib import Path

import pytest

from tests.kernels.test_compilation import KERNELS, SHARED_BYTES_MAX, compile_with

PROGRAM = "tests.engine.device.steps_on_a_device"

pytestmark = pytest.mark.wire

VARIANTS_MAX = 16
"""Compiled variants per kernel over the 14 steps of two models: fewer than one per batch."""


@pytest.mark.slow
def test_steps_use_no_tensor_of_another_device_and_the_same_kernels_for_all_batches(
    tmp_path: Path,
) -> None:
    lines = compile_with(PROGRAM, cache=tmp_path)

    assert {line["kernel"] for line in lines} == KERNELS
    assert all(line["variants"] <= VARIANTS_MAX for line in lines)
    launches = {line["kernel"]: line["launches"] for line in lines}
    assert launches["_attend_kernel"] > 2 * VARIANTS_MAX


@pytest.mark.skipif("TIDEGATE_COMPILE" not in os.environ, reason="run `make test-device`")
@pytest.mark.slow
def test_each_kernel_that_steps_ask_for_compiles_for_an_h100(tmp_path: Path) -> None:
    lines = compile_with(PROGRAM, "compile", cache=tmp_path)
    compiled = [line for line in lines if "shared_bytes" in line]

    assert {line["kernel"] for line in compiled} == KERNELS
    assert max(line["shared_bytes"] for line in compiled) <= SHARED_BYTES_MAX
