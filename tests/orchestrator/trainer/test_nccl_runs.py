"""Tests that version tags are right in runs that send weights to vLLM by NCCL: whole runs, audited.

vLLM and NCCL are doubles, the GPU is the host's memory; the worker and all that it sends are real.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.external.adapter_runs import InTheMidst, train
from tests.engine.external.vllm_double import VllmDouble
from tests.models import make_model_directory
from tests.nccl_double import built

pytestmark = pytest.mark.wire

MEETING = "ipc://{}/run"


@contextmanager
def adapter(double: VllmDouble, model: Path, folder: Path) -> Iterator[Path]:
    """A worker that connects to a run there, and its log."""
    library = built(folder)
    ctypes.CDLL(str(library))  # the double's end
    command = [sys.executable, "-m", "tests.engine.weights.nccl_worker", "--engine", "gpu"]
    command += ["--connect", MEETING.format(folder), "--model", str(model)]
    command += ["--url", f"vllm+{double.url}#weights=nccl"]
    command += ["--stream-interval-tokens", "1"]  # else the first update keeps no turn's KV
    environment = os.environ | {"NCCL_DOUBLE": str(library), "NCCL_DOUBLE_FOLDER": str(folder)}
    log = folder / "log"
    with log.open("wb") as output:
        worker = subprocess.Popen(command, env=environment, stderr=output)
        try:
            yield log
        finally:
            worker.terminate()
            worker.wait(30)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for sockets are in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


async def test_tags_are_right_where_weights_are_broadcast_and_one_update_fails_halfway(
    tmp_path: Path, folder: Path
) -> None:
    model = make_model_directory(tmp_path / "untied", tied=False)
    with VllmDouble(model, weight_transfer={"backend": "nccl"}) as double:
        double.holds = InTheMidst()

        def fail_once() -> None:
            double.transfers.fails_at = "model.norm.weight"

        with adapter(double, model, folder) as log:
            report = await train(
                model,
                tmp_path / "run",
                after_two=fail_once,
                engines=0,
                listen_address=MEETING.format(folder),
                kv_policy="keep",
            )
            assert "starts again" in log.read_text()
    assert report.problems == ()
    assert report.agrees
    assert report.tokens_unknown == 0
    assert report.versions > 2
    assert report.spans_mixed > 0
    assert double.loads == []
    assert len(double.transfers.took) > 3
