"""What weight versions cost on disk, and that each is rebuilt to the bit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidegate.errors import AuditError
from tidegate.observability.records.recording import RunRecorder
from tidegate.observability.records.run_directories import next_part
from tidegate.observability.records.weight_archive import (
    PATCHES_MAX,
    RebuiltVersions,
    archived_versions,
    archived_weights,
    complete_versions,
    weights_path,
)
from tidegate.orchestrator.weight_sync.parts import WeightParts

Tensors = dict[str, torch.Tensor]

ELEMENTS = 256 * 256
CHANGED_SHARE = 0.01


def first_weights(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    torch.manual_seed(7)
    return {
        "embed.weight": torch.randn(256, 256).to(dtype),
        "layer.weight": torch.randn(256, 256).to(dtype),
        "norm.weight": torch.ones(256, dtype=dtype),
        "norm.scale": torch.tensor(0.5, dtype=dtype),
        "empty.weight": torch.empty(0, 4, dtype=dtype),
        "steps": torch.arange(300, dtype=torch.int64),
    }


def stepped(weights: Tensors) -> Tensors:
    """Return weights of which some elements differ in their last bits."""
    now = {name: tensor.clone() for name, tensor in weights.items()}
    for name in (name for name in ("embed.weight", "layer.weight", "steps") if name in now):
        flat = now[name].view(-1)
        index = torch.randperm(len(flat))[: max(1, int(CHANGED_SHARE * len(flat)))]
        flat[index] = flat[index] + (1 if flat.dtype is torch.int64 else flat[index] / 64)
    return now


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_of(tmp_path / "model", first_weights())


def model_of(path: Path, weights: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(weights, path / "model.safetensors")
    return path


def record(directory: Path, model: Path, *versions: Tensors, keep: str = "all") -> Path:
    """Record versions, numbered from the first that the run does not have."""
    settings = {"archive_weights": keep}
    if (directory / "run.json").exists():
        directory = next_part(directory)
    first = max(archived_versions(directory), default=0) + 1
    with RunRecorder(directory, settings=settings, model=model, archive_weights=keep) as recorder:
        for version, weights in enumerate(versions, start=first):
            recorder.weights(version, weights)
    return directory


def successors(weights: Tensors, count: int) -> list[Tensors]:
    versions = [weights]
    for _ in range(count):
        versions.append(stepped(versions[-1]))
    return versions[1:]


def rebuilt(directory: Path, version: int) -> Tensors:
    with closing(RebuiltVersions()) as versions:
        path = versions.directory(archived_weights(directory, version))
        return load_file(path / "model.safetensors")


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert (
            found[name].numpy(force=True).tobytes() == tensor.numpy().tobytes()
            if (tensor.dtype is not torch.bfloat16)
            else torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
        )


def own_bytes(directory: Path) -> int:
    """Return the bytes that a directory's files take, without those of hard links."""
    stats = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(each.st_size for each in stats if each.st_nlink == 1)


def test_versions_of_which_few_elements_change_take_a_small_part_of_a_set(
    tmp_path: Path, model: Path
) -> None:
    whole = (model / "model.safetensors").stat().st_size
    run = record(tmp_path / "run", model, *successors(first_weights(), 8))

    assert own_bytes(weights_path(run, 0)) < 0.001 * whole
    for version in range(1, 9):
        patched = own_bytes(weights_path(run, version))
        assert patched < 4 * CHANGED_SHARE * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_version_is_rebuilt_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of(tmp_path / "model", first_weights(dtype))
    versions = successors(first_weights(dtype), 5)
    versions[3]["embed.weight"][0, 0] = float("nan")
    versions.append({name: tensor.clone() for name, tensor in versions[-1].items()})  # no change
    run = record(tmp_path / "run", model, *versions)

    for version, weights in reversed([*enumerate(versions, start=1)]):
        assert WeightParts.read(weights_path(run, version)).patch_of == version - 1
        assert_same_bits(rebuilt(run, version), weights)
    with closing(RebuiltVersions()) as all_versions:  # in order, as an audit asks for them
        for version, weights in enumerate(versions, start=1):
            path = all_versions.directory(archived_weights(run, version))
            assert_same_bits(load_file(path / "model.safetensors"), weights)


def with_most_elements_changed(weights: Tensors) -> Tensors:
    return {name: tensor + 1 if tensor.numel() else tensor for name, tensor in weights.items()}


def without_a_tensor(weights: Tensors) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if name != "steps"}


def of_another_dtype(weights: Tensors) -> Tensors:
    return first_weights(torch.float32)


@pytest.mark.parametrize(
    ("changed", "file"),
    [
        (with_most_elements_changed, "model.safetensors"),
        (without_a_tensor, "model.safetensors"),
        (of_another_dtype, "patch.safetensors"),  # of whole tensors, but for those of integers
    ],
)
def test_a_version_that_a_patch_can_not_make_is_whole_once(
    tmp_path: Path, model: Path, changed: Callable[[Tensors], Tensors], file: str
) -> None:
    first = changed(first_weights())
    run = record(tmp_path / "run", model, first, second := stepped(first))

    assert (weights_path(run, 1) / file).is_file()
    assert_same_bits(rebuilt(run, 1), first)
    whole, patch = (own_bytes(weights_path(run, version)) for version in (1, 2))
    assert patch < whole / 10
    assert_same_bits(rebuilt(run, 2), second)


def test_no_version_is_rebuilt_from_more_patches_than_the_limit(
    tmp_path: Path, model: Path
) -> None:
    versions = successors(first_weights(), PATCHES_MAX + 4)
    run = record(tmp_path / "run", model, *versions)

    wholes = [v for v, parts in complete_versions(run).items() if parts.patch_of is None]
    assert wholes == [0, PATCHES_MAX + 1]
    assert_same_bits(rebuilt(run, PATCHES_MAX), versions[PATCHES_MAX - 1])

    last = record(tmp_path / "last", model, *versions, keep="last:2")
    # Kept are the two, and what they are rebuilt from.
    assert [*archived_versions(last)] == [*range(PATCHES_MAX + 1, PATCHES_MAX + 5)]
    for version in (PATCHES_MAX + 3, PATCHES_MAX + 4):
        assert_same_bits(rebuilt(last, version), versions[version - 1])


def test_a_tied_head_that_a_cast_has_made_a_copy_is_written_once_until_it_differs(
    tmp_path: Path, model: Path
) -> None:
    def with_head(weights: Tensors) -> Tensors:
        return weights | {"head.weight": weights["embed.weight"].clone()}

    first, second = (with_head(each) for each in successors(first_weights(), 2))
    third = second | {"head.weight": second["head.weight"] * 2}
    run = record(tmp_path / "run", model, first, second, third)

    part = ELEMENTS * 2
    assert own_bytes(weights_path(run, 1)) < part / 4
    assert own_bytes(weights_path(run, 2)) < part / 4
    for version, weights in enumerate((first, second, third), start=1):
        assert_same_bits(rebuilt(run, version), weights)


def test_partial_sets_keep_the_set_below_them(tmp_path: Path, model: Path) -> None:
    with RunRecorder(tmp_path / "run", settings={}, model=model, archive_weights="last:1") as run:
        run.weights(1, stepped(first_weights()))
        run.weights(2, {"norm.weight": torch.zeros(256)}, WeightParts(over=1))
        run.weights(3, {"norm.weight": torch.ones(256)}, WeightParts(over=2))

    assert complete_versions(tmp_path / "run").keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(("keep", "kept"), [("every:3", [0, 3, 6]), ("none", [])])
def test_versions_that_the_setting_leaves_out_are_not_written(
    tmp_path: Path, model: Path, keep: str, kept: list[int]
) -> None:
    versions = successors(first_weights(), 7)
    run = record(tmp_path / "run", model, *versions, keep=keep)

    assert [*archived_versions(run)] == kept
    for version in kept[1:]:
        assert_same_bits(rebuilt(run, version), versions[version - 1])


def test_a_resumed_run_shares_the_first_version_and_continues_from_it(
    tmp_path: Path, model: Path
) -> None:
    versions = successors(first_weights(), 4)
    run = record(tmp_path / "run", model, *versions[:2])
    before = own_bytes(run / "weights")
    part = record(run, model, *versions[2:])

    assert part.name == "part-1"
    assert own_bytes(run / "weights") == before
    assert [path.name for path in sorted((part / "weights").iterdir())] == ["v00003", "v00004"]
    for version, weights in enumerate(versions, start=1):
        assert_same_bits(rebuilt(run, version), weights)
        assert_same_bits(rebuilt(part, version), weights)


def test_the_first_version_outlives_the_models_directory_and_is_copied_across_disks(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = record(tmp_path / "linked", model)

    def refuse(*paths: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    copied = record(tmp_path / "copied", model)
    assert own_bytes(copied / "weights") > (model / "model.safetensors").stat().st_size
    shutil.rmtree(model)
    for run in (linked, copied):
        assert_same_bits(rebuilt(run, 0), first_weights())


def overwrite_in_place(run: Path) -> None:
    path = weights_path(run, 0) / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def remove_base(run: Path) -> None:
    shutil.rmtree(weights_path(run, 1))


def cut_patch(run: Path) -> None:
    path = weights_path(run, 2) / "patch.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def swap_patches(run: Path) -> None:
    other = weights_path(run, 1)
    shutil.copy(other / "patch.safetensors", weights_path(run, 2) / "patch.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite_in_place, r"v00000/model\.safetensors .* was changed in place"),
        (remove_base, r"v00002 is a patch of .*v00001, which is missing"),
        (cut_patch, r"v00002 can't be loaded"),
        (swap_patches, r"v00002 can't be loaded"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, model: Path, damage: Callable[[Path], None], message: str
) -> None:
    run = record(tmp_path / "run", model, *successors(first_weights(), 2))
    damage(run)
    with pytest.raises(AuditError, match=message):
        rebuilt(run, 2)


KILLED = """
import os, signal, sys
from pathlib import Path
import safetensors.torch
from tests.observability.records.test_weight_archive import first_weights, record, successors

directory, model, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
save = safetensors.torch.save_file

def save_half(tensors, path, **options):
    save(tensors, path, **options)
    if path.parent.name.startswith(version):
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

safetensors.torch.save_file = save_half
record(directory, model, *successors(first_weights(), 4))
"""


@pytest.mark.wire
def test_a_process_killed_while_it_writes_a_version_leaves_a_readable_archive(
    tmp_path: Path, model: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(run), str(model), "v00003"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == -9

    versions = successors(first_weights(), 4)
    assert weights_path(run, 3).with_name("v00003.draft").exists()
    assert complete_versions(run).keys() == {0, 1, 2}
    assert_same_bits(rebuilt(run, 2), versions[1])
    part = record(run, model, *versions[2:])
    assert not weights_path(run, 3).with_name("v00003.draft").exists()
    assert_same_bits(rebuilt(part, 4), versions[3])
