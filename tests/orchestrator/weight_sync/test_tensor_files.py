"""Tensors read from files that may change are copies, or refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models import make_model_directory
from tidegate.errors import ConfigError, ModelError
from tidegate.orchestrator.episodes.model_files import read_model_files
from tidegate.orchestrator.weight_sync.adapter_files import load_adapter
from tidegate.orchestrator.weight_sync.tensor_files import read_tensor_file
from tidegate.serving.control.receivers import read_tensors
from tidegate.serving.http.errors import UpdateError

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]


def saved(path: Path) -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.arange(15).reshape(3, 5).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 4), "single": torch.tensor(7.5)}
    save_file(tensors, path, {"format": "pt"})
    return tensors


def test_all_that_the_library_writes_is_read_alike(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "file.safetensors")
    read = read_tensor_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].flatten().tolist() == tensor.flatten().tolist()


def test_tensors_of_a_file_that_is_overwritten_or_truncated_afterwards_stay_as_they_were(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.safetensors"
    tensors = saved(path)
    for change in (lambda: path.write_bytes(b"\xff" * path.stat().st_size), path.unlink):
        read = read_tensors(path)
        if change is not path.unlink:
            os.truncate(path, 100)
        change()
        assert read["torch.float32"].tolist() == tensors["torch.float32"].tolist()
        saved(path)


@pytest.mark.parametrize("length", [0, 4, 20, 300, -1])
def test_a_file_that_is_cut_off_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    saved(path)
    os.truncate(path, length % path.stat().st_size)
    with pytest.raises(UpdateError, match="can't be read"):
        read_tensors(path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"w": 5}',
        b"[]",
        b"{",
    ],
)
def test_a_header_that_contradicts_itself_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(UpdateError, match="can't be read"):
        read_tensors(path)


def test_a_fifo_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "model.safetensors"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path):
        with pytest.raises(UpdateError, match="it is not a regular file"):
            read_tensors(path)
    (tmp_path / "adapter_config.json").write_text("{}")
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        load_adapter(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_directory_with_a_fifo_is_refused(name: str, tmp_path: Path) -> None:
    make_model_directory(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} can't be read: it is not a regular file"):
        read_model_files(tmp_path)
