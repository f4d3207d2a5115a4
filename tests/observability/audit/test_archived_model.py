"""Loading of archived versions that consist of a full set and later parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import make_model_directory
from tidegate.errors import AuditError
from tidegate.observability.audit.archived_model import load_version
from tidegate.orchestrator.weight_sync.parts import WeightParts

EXPERT = "model.layers.1.mlp.experts.3"


def archive(path: Path, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Archive a mixture-of-experts model as v0 and ``part`` as v1; return the tensors of v0."""
    whole = make_model_directory(path / "0", "qwen3_moe")
    (path / "1").mkdir()
    parts = WeightParts(over=0)
    parts.write(path / "1")
    save_file(part, path / "1" / parts.file_name)
    return load_file(whole / "model.safetensors")


def test_single_experts_may_be_published_by_the_names_of_directories(tmp_path: Path) -> None:
    names = [f"{EXPERT}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    shapes = [(40, 64), (40, 64), (64, 40)]
    part = {n: torch.randn(shape) for n, shape in zip(names, shapes, strict=True)}
    state = archive(tmp_path, part) | part

    model = load_version(1, lambda version: tmp_path / str(version))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


@pytest.mark.parametrize("name", [f"{EXPERT}.up_proj.weight", "model.layers.9.mlp.gate.weight"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str) -> None:
    archive(tmp_path, {name: torch.zeros(3, 5)})
    with pytest.raises(AuditError, match=name):
        load_version(1, lambda version: tmp_path / str(version))
