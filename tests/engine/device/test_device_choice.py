"""Refusals at start-up of missing devices, and of models and settings without GPU support."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import make_model_directory
from tidegate.engine import worker
from tidegate.engine.device.devices import find_device
from tidegate.engine.device.model import DeviceModel, open_on_device, refuse_on_device
from tidegate.errors import ConfigError
from tidegate.orchestrator.fleet.processes import engine_options
from tidegate.orchestrator.settings.config import run_settings

CUDA = torch.device("cuda:0")


def test_cpu_resolves_to_no_device() -> None:
    assert find_device("cpu") is None


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:0,1", "tpu:0", ""])
def test_device_names_other_than_cuda_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'cuda:N', got {name!r}"):
        find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_engine_without_cuda_exits_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--connect", "ipc://nowhere", "--model", str(tmp_path), "--engine", "e0"]

    assert worker.main([*options, "--device", "cuda:1"]) == worker.UNUSABLE

    output = capsys.readouterr().err
    assert "device='cuda:1'" in output
    assert "finds no CUDA device here" in output
    assert "set device to cpu" in output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_deterministic", True),
        ("quantization", "int8"),
        ("tensor_parallel_size", 2),
        ("speculative_method", "draft:models/small"),
    ],
)
def test_settings_without_gpu_support_are_refused_by_name(name: str, value: Any) -> None:
    nothing: dict[str, Any] = {
        "is_deterministic": False,
        "quantization": None,
        "tensor_parallel_size": 1,
        "speculative_method": "lookup",
    }
    refuse_on_device(CUDA, **nothing)
    with pytest.raises(ConfigError, match=rf"{name.removeprefix('is_')}=.* device=cuda:0"):
        refuse_on_device(CUDA, **nothing | {name: value})


def test_models_without_gpu_support_are_refused_before_loading(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM is a mixture of experts"):
        open_on_device(make_model_directory(tmp_path / "moe", "qwen3_moe"), "auto", CUDA)
    with pytest.raises(ConfigError, match="on the CPU only; serve another model"):
        open_on_device(make_model_directory(tmp_path / "gpt2", "gpt2"), "auto", CUDA)


def test_a_model_on_a_device_is_opened_like_any_other(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "llama", num_hidden_layers=1)

    model = open_on_device(path, "bfloat16", torch.device("cpu"))

    assert isinstance(model, DeviceModel)
    assert model.kv_token_bytes() == 2 * 2 * 16 * 2  # keys and values, heads, of 16, in bfloat16
    runner = model.make_runner(num_blocks=3, block_tokens=8)
    assert (runner.num_blocks, runner.block_tokens) == (3, 8)
    assert {tensor.dtype for tensor in runner.cache_tensors()} == {torch.bfloat16}


def test_a_run_passes_the_device_to_its_engines(tmp_path: Path) -> None:
    on_one = run_settings(model=tmp_path, device="cuda:1")
    assert "--device cuda:1" in " ".join(
        engine_options(on_one.model, on_one.engine, "engine-0", "ipc://somewhere")
    )
    on_any = run_settings(model=tmp_path)
    assert "--device" not in engine_options(
        on_any.model, on_any.engine, "engine-0", "ipc://somewhere"
    )
    with pytest.raises(ConfigError, match="device"):
        run_settings(model=tmp_path, device="gpu")
