import json
from pathlib import Path

import pytest
import torch

from tests.models import make_model_directory
from tidegate.engine.models.checkpoint import INDEX_FILE, SINGLE_FILE, read_tensors
from tidegate.errors import ModelError


def test_a_sharded_directory_holds_the_same_tensors_as_a_single_file(tmp_path: Path) -> None:
    single = dict(read_tensors(make_model_directory(tmp_path / "single")))
    sharded = dict(read_tensors(make_model_directory(tmp_path / "sharded", shards=3)))

    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def test_a_file_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path)
    file = path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ModelError, match=r"model\.safetensors is no complete safetensors file"):
        list(read_tensors(path))


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        list(read_tensors(path))


def test_a_tensor_that_the_index_promises_in_vain_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, shards=2)
    index = json.loads((path / INDEX_FILE).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (path / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"lacks tensor 'model\.extra\.weight'"):
        list(read_tensors(path))


def test_a_damaged_index_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text('{"weight_map": 3}')

    with pytest.raises(ModelError, match=r"index\.json is no index of safetensors"):
        list(read_tensors(tmp_path))


def test_a_directory_of_other_formats_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin; save the model again as safetensors"
    ):
        list(read_tensors(tmp_path))
