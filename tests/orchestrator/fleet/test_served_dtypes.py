"""Dtype that engines compute in: in their hello, recorded, and applied by the audit."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tests.models import make_model_directory
from tests.mortal_trainer import weights
from tests.observability.recorded import solve
from tidegate.observability.audit.audit import TOLERANCE, TOLERANCES, audit_run
from tidegate.orchestrator.episodes.model_files import read_model_files

pytestmark = pytest.mark.wire


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_of_another_precision_is_named_recorded_and_audited_by_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    model, run, address = tmp_path / "model", tmp_path / "run", f"ipc://{tmp_path}/socket"
    make_model_directory(model)
    command = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    command += ["--model", str(model), "--engine", "outsider", "--dtype", dtype]
    caplog.set_level(logging.WARNING, "tidegate")
    engine = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with tidegate.serve_sync(
            model=model,
            engines=0,
            listen_address=address,
            group_size=2,
            groups_per_batch=2,
            run_directory=run,
        ) as rollouts:
            for version, _ in enumerate(rollouts.batches(["1+1=", "2+2=", "3+3="], episode=solve)):
                rollouts.publish(weights(model, version + 1))
            (reported,) = rollouts.statistics().engines
            assert reported.dtype == dtype
    finally:
        engine.kill()
        engine.wait()
    warned = [r.getMessage() for r in caplog.records if "weights_dtype" in r.getMessage()]
    assert json.loads((run / "run.json").read_bytes())["dtypes"] == {"outsider": dtype}
    report = audit_run(run)
    assert report.agrees
    if dtype == "float32":
        assert warned == []
        assert report.tolerance == TOLERANCE
        return
    assert len(warned) == 1
    assert "engine=outsider dtype=bfloat16 weights_dtype=float32" in warned[0]
    assert report.is_exact
    rounded = audit_run(run, tolerance=TOLERANCES["bfloat16"])
    assert rounded.agrees
    assert any("'outsider' computed in bfloat16" in line for line in rounded.lines())
    assert not audit_run(run, tolerance=TOLERANCE).agrees  # what was reported as a disagreement


def test_the_precision_of_a_model_directory_is_read_wherever_it_stands(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model_directory(model)
    config = json.loads((model / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    for reported, says in (
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, ""),
    ):
        (model / "config.json").write_text(json.dumps({**config, **reported}))
        assert read_model_files(model).dtype == says
