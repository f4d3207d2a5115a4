"""Hub ids that Hugging Face's local cache resolves, without a download."""

from pathlib import Path

import pytest

from tidegate import runs
from tidegate.errors import ModelError
from tidegate.orchestrator.episodes.model_files import read_model_files
from tidegate.orchestrator.settings.config import run_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHOLE = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in place of the user's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(cache: Path, *files: str) -> Path:
    repository = cache / "models--acme--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def test_a_hub_id_is_its_snapshot_in_the_cache(cache: Path) -> None:
    snapshot = cached(cache, *WHOLE)
    assert run_settings(model="acme/tiny").model == snapshot


def test_a_server_names_a_model_by_its_hub_id_and_not_by_the_hash_of_its_directory(
    cache: Path,
) -> None:
    cached(cache, *WHOLE)
    assert runs._hub_id("acme/tiny", run_settings(model="acme/tiny")) == "acme/tiny"
    assert runs._hub_id("models/mine", run_settings(model="models/mine")) is None


def test_a_directory_of_the_same_name_goes_first(cache: Path) -> None:
    cached(cache, *WHOLE)
    Path("acme/tiny").mkdir(parents=True)
    assert run_settings(model="acme/tiny").model == Path("acme/tiny")


@pytest.mark.parametrize("files", [(), ("config.json",), ("config.json", "tokenizer.json")])
def test_what_is_not_in_the_cache_or_only_in_part_is_refused_with_the_command_that_gets_it(
    cache: Path, files: tuple[str, ...]
) -> None:
    if files:
        cached(cache, *files)
    model = run_settings(model="acme/tiny").model
    with pytest.raises(ModelError, match=r"does not exist.*hf download acme/tiny$"):
        read_model_files(model)


def test_a_file_is_called_a_file_and_a_gguf_file_one_that_was_converted(tmp_path: Path) -> None:
    for name, ends in (
        ("model.gguf", "tokenizer.json, such as the one that it was converted from"),
        ("config.json", "tokenizer.json"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(ModelError) as refused:
            read_model_files(tmp_path / name)
        assert str(refused.value).startswith(f"model={tmp_path / name} is a file; give the path of")
        assert str(refused.value).endswith(ends)


@pytest.mark.parametrize("path", ["/acme/tiny", "tiny", "a/b/c", "../tiny", "acme/ti ny"])
def test_other_paths_are_no_hub_ids(cache: Path, path: str) -> None:
    with pytest.raises(ModelError, match="does not exist") as refused:
        read_model_files(run_settings(model=path).model)
    assert "hf download" not in str(refused.value)
