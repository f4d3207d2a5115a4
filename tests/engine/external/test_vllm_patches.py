"""Changes of elements for vLLM: their file, the worker extension, and servers that take them."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.engine.external.vllm_double import VllmDouble
from tests.models import make_model_directory
from tidegate.engine.external.vllm import make_adapter
from tidegate.engine.external.vllm_patches import (
    EXTENSION,
    RPC,
    PatchedWorker,
    read_changes,
    write_changes,
)
from tidegate.errors import EngineGone, WeightsRefused

TENSORS = {
    "a": torch.arange(6.0).view(2, 3).to(torch.bfloat16),
    "b": torch.tensor([1.0, float("nan")]),
    "ids": torch.arange(3),
}


def test_a_file_has_each_changed_element_once_with_its_newest_value(tmp_path: Path) -> None:
    file = tmp_path / "changes"
    assert write_changes(TENSORS, {"a": [np.array([5, 1]), np.array([1, 2])]}, file)
    [change] = read_changes(file, "cpu")
    assert (change.name, change.shape) == ("a", (2, 3))
    assert change.indices.dtype == torch.int32
    assert change.indices.tolist() == [1, 2, 5]
    assert torch.equal(change.values, torch.tensor([1, 2, 5], dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "index"), [("b", 1), ("ids", 0), ("fused", 0)])
def test_what_vllm_could_not_change_is_not_written(name: str, index: int, tmp_path: Path) -> None:
    file = tmp_path / "changes"
    assert not write_changes(TENSORS, {name: [np.array([index])]}, file)
    assert not file.exists()


@dataclass
class LoaderModule:
    """Where vLLM has its loader of changes."""

    loaded: list[tuple[Any, list[dict[str, Any]]]] = field(default_factory=list)

    def load_checkpoint_weight_patches(self, model: object, patches: list[dict[str, Any]]) -> None:
        self.loaded.append((model, patches))

    CheckpointWeightPatch = dict


class Worker(PatchedWorker):
    """A worker class, as vLLM extends it."""

    device = torch.device("cpu")
    vllm_config = object()

    def __init__(self) -> None:
        self.model_runner = self

    def get_model(self) -> str:
        return "the model"


def test_workers_pass_changes_to_vllms_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, loader, config = tmp_path / "changes", LoaderModule(), ModuleType("vllm.config")
    write_changes(TENSORS, {"a": [np.array([4])]}, file)
    config.set_current_vllm_config = lambda _: torch.no_grad()  # type: ignore[attr-defined]
    name = "vllm.model_executor.model_loader.checkpoint_weight_patch"
    monkeypatch.setitem(sys.modules, name, loader)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    getattr(Worker(), RPC)(str(file))
    [(model, [patch])] = loader.loaded
    assert model == "the model"
    assert (patch["name"], patch["shape"], patch["dtype"]) == ("a", (2, 3), torch.bfloat16)
    assert (patch["indices"].tolist(), patch["values"].tolist()) == ([4], [4.0])


def test_other_builds_than_cuda_refuse_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotImplementedError, match="only CUDA builds"):
        Worker().load_tidegate_patches("/nowhere")


@pytest.mark.wire
async def test_a_server_that_loads_neither_changes_nor_files_after_them_is_given_up(
    tmp_path: Path,
) -> None:
    model, file = make_model_directory(tmp_path / "model", tied=False), tmp_path / "changes"
    name = "model.norm.weight"
    columns = {f"indices {name}": torch.tensor([3, 3]), f"values {name}": torch.zeros(2)}
    save_file(columns, file, metadata={"shapes": json.dumps({name: [64]})})
    with VllmDouble(model, worker_extension_cls=EXTENSION) as double:
        adapter = make_adapter(double.url, model)
        try:
            await adapter.open("v0")
            await adapter.pause("abort")
            with pytest.raises(WeightsRefused, match=r"can't change elements.*duplicate indices"):
                await adapter.load_patches(file, "v1")
            double.fails_to_load = lambda path: True
            with pytest.raises(EngineGone, match="after elements of the old were changed"):
                await adapter.load_weights(model, "v1")
            assert double.label == "v0"
        finally:
            await adapter.close()


async def takes_patches(model: Path, **config: Any) -> bool:
    with VllmDouble(model, **{"worker_extension_cls": EXTENSION} | config) as double:
        adapter = make_adapter(double.url, model)
        try:
            return (await adapter.open("v0")).takes_patches
        finally:
            await adapter.close()


@pytest.mark.wire
async def test_servers_take_changes_whose_release_start_and_model_allow_it(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "qwen3", tied=False)
    mixture = make_model_directory(tmp_path / "mixture", "qwen3_moe")
    assert await takes_patches(model)
    assert not await takes_patches(model, version="0.28.0")
    assert not await takes_patches(model, worker_extension_cls="")
    assert not await takes_patches(model, device="cpu")
    assert not await takes_patches(model, quantization="fp8")
    assert not await takes_patches(model, lora_rank_max=8)
    assert not await takes_patches(mixture)
