"""Reads a model directory's tensors from safetensors, single or sharded.

Tensors have their Hugging Face names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tidegate.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two tensors that are one if ``tie_word_embeddings`` is set."""

DOWNLOAD_AGAIN = "download or save the model again"
"""What to do about a model directory with an incomplete file."""


class _Index(msgspec.Struct):
    """The part of the index file that is read."""

    weight_map: dict[str, str]


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the directory ``path`` with its name, one at a time.

    The tensors are views of the mapped file where the platform allows it: copy what you keep.

    Raises:
        ModelError: there are no safetensors, a file is missing or damaged, or a tensor of the index
            is missing.
    """
    for file, promised in _files(path).items():
        with _open(file) as tensors:
            names = set(tensors.keys())
            missing = sorted(promised - names)
            if missing:
                raise ModelError(
                    f"{file} lacks tensor {missing[0]!r}, which {INDEX_FILE} lists for it; "
                    f"{DOWNLOAD_AGAIN}"
                )
            for name in sorted(names):
                yield name, tensors.get_tensor(name)


def tensor_names(path: Path) -> set[str]:
    """Return the names of the directory's tensors.

    Raises:
        ModelError: as :func:`read_tensors`.
    """
    names: set[str] = set()
    for file in _files(path):
        with _open(file) as tensors:
            names |= set(tensors.keys())
    return names


def has_other_head(path: Path) -> bool:
    """Return whether the directory has an LM head that differs from its embedding.

    Raises:
        ModelError: as :func:`read_tensors`.
    """
    found: dict[str, torch.Tensor] = {}
    for file in _files(path):
        with _open(file) as tensors:
            for name in {EMBEDDING, HEAD} & set(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return len(found) == 2 and not torch.equal(found[EMBEDDING], found[HEAD])


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise ModelError(
            f"{file} is missing, but {INDEX_FILE} lists it; {DOWNLOAD_AGAIN}"
        ) from error
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is no complete safetensors file ({error}); {DOWNLOAD_AGAIN}"
        ) from error


def _files(path: Path) -> dict[Path, set[str]]:
    """Return each file to read, with the tensors that the index says it has."""
    index = path / INDEX_FILE
    if index.exists():
        files: dict[Path, set[str]] = {}
        for name, file in _read_index(index).weight_map.items():
            files.setdefault(path / Path(file).name, set()).add(name)
        return files
    if (path / SINGLE_FILE).exists():
        return {path / SINGLE_FILE: set()}
    found = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt"))
    raise ModelError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        + (
            f", but {', '.join(found)}; save the model again as safetensors"
            if found
            else "; give the directory of a Hugging Face model"
        )
    )


def _read_index(file: Path) -> _Index:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{file} is no index of safetensors files ({error}); {DOWNLOAD_AGAIN}"
        ) from error
