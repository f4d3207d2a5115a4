"""Tests of the disk weight channel's files: standard format, few, and in one directory."""

import os
from pathlib import Path

import pytest
from safetensors import safe_open

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels import NamedBuffer, receiver, sender
from tidegate.transport.weight_channels.base import ITEM_BYTES

WEIGHT = NamedBuffer("w", "bfloat16", (3,), memoryview(bytes(range(6))))


def test_files_on_disk_can_be_read_with_the_safetensors_library(tmp_path: Path) -> None:
    weights = sender("disk", tmp_path)
    tensors = [
        NamedBuffer(f"{dtype} wéights", dtype, (3, 5), memoryview(bytes(range(15 * item_bytes))))
        for dtype, item_bytes in reversed(ITEM_BYTES.items())
    ]
    [update] = weights.write(7, tensors)
    offsets = {spec.name: spec.offset for spec in update.tensors}
    assert all(offsets[t.name] % ITEM_BYTES[t.dtype] == 0 for t in tensors)
    with safe_open(update.location, framework="pt") as file:
        assert file.metadata() == {"weight_version": "7"}
        assert set(file.keys()) == {tensor.name for tensor in tensors}
        for sent in tensors:
            read = file.get_tensor(sent.name)
            assert str(read.dtype) == f"torch.{sent.dtype}"
            assert tuple(read.shape) == sent.shape
            assert bytes(read.untyped_storage()) == bytes(sent.data)
    weights.close()


def test_only_the_newest_two_versions_stay_on_disk_and_none_after_closing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    weights = sender("disk", tmp_path)
    for version in (0, 1, 2, 2):
        weights.write(version, [WEIGHT])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt",
        "weights-00000001.safetensors",
        "weights-00000002.safetensors",
    ]
    weights.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_that_is_truncated_while_it_is_read_is_refused_and_ends_no_process(
    tmp_path: Path,
) -> None:
    weights = sender("disk", tmp_path)
    tensors = [
        NamedBuffer(name, "float32", (4096,), memoryview(bytes(4 * 4096))) for name in ("a", "b")
    ]
    [update] = weights.write(0, tensors)
    read = receiver(weights.init()).tensors(update)
    _, first = next(read)
    os.truncate(update.location, 4096)
    assert bytes(first) == bytes(4 * 4096)
    with pytest.raises(WeightsRefused, match="while it was read \\(it ends at byte 16576"):
        next(read)
    weights.close()


def test_a_fifo_in_place_of_a_version_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    weights = sender("disk", tmp_path)
    os.mkfifo(tmp_path / "x")
    with pytest.raises(WeightsRefused, match="it is not a regular file"):
        receiver(weights.init()).tensors(
            UpdateWeights(version=0, location=f"{tmp_path}/x", tensors=[])
        )
    weights.close()


def test_files_that_a_killed_process_left_make_place_for_newer_ones(tmp_path: Path) -> None:
    killed = sender("disk", tmp_path)
    for version in (3, 4):
        killed.write(version, [WEIGHT])
    weights = sender("disk", tmp_path)
    for version in (4, 5):
        weights.write(version, [WEIGHT])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "weights-00000004.safetensors",
        "weights-00000005.safetensors",
    ]
    weights.close()
    assert list(tmp_path.iterdir()) == []


def test_without_a_directory_the_files_lie_in_one_that_is_removed() -> None:
    weights = sender("disk")
    [update] = weights.write(0, [WEIGHT])
    directory = Path(update.location).parent
    weights.close()
    assert not directory.exists()


def test_a_receiver_reads_nothing_outside_of_the_directory(tmp_path: Path) -> None:
    weights = sender("disk", tmp_path)
    end = receiver(weights.init())
    for location in ("/etc/passwd", f"{tmp_path}/../x", f"{tmp_path}/sub/x"):
        with pytest.raises(WeightsRefused, match="outside of the weight directory"):
            end.tensors(UpdateWeights(version=0, location=location, tensors=[]))
    with pytest.raises(WeightsRefused, match="No such file"):
        end.tensors(UpdateWeights(version=0, location=f"{tmp_path}/x", tensors=[]))
    (tmp_path / "x").touch()
    with pytest.raises(WeightsRefused, match="is empty"):
        end.tensors(UpdateWeights(version=0, location=f"{tmp_path}/x", tensors=[]))
    weights.close()
