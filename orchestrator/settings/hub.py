"""Lookup of Hugging Face hub ids in the local cache; downloads nothing.

``settings/config.py`` calls :func:`find_model` to resolve ``model="Qwen/Qwen3-0.6B"``.
"""

import re
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""An owner and a name. A relative path of two parts has the same form, so an existing directory
takes precedence."""

NEEDED = ("config.json", "tokenizer.json", "*.safetensors")
"""Files without which a model can't be served."""


def find_model(model: Path) -> Path:
    """Return the directory of a model: the given one, or the cached snapshot of a hub id.

    If neither exists, the path is returned unchanged, and opening it raises the error.
    """
    if model.is_dir() or HUB_ID.fullmatch(str(model)) is None:
        return model
    # Imported here: only models that are no directory need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(str(model), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return model
    return snapshot if all(any(snapshot.glob(pattern)) for pattern in NEEDED) else model


def describe_missing_model(model: Path) -> str:
    """Return why there is no model directory at this path and what to do, as an error message."""
    hint = "give the path of a directory with config.json, *.safetensors and tokenizer.json"
    if model.is_file():
        hint += ", such as the one that it was converted from" * (model.suffix == ".gguf")
        return f"model={model} is a file; {hint}"
    return f"model directory {model} does not exist; {hint}{_hub_hint(model)}"


def _hub_hint(model: Path) -> str:
    if HUB_ID.fullmatch(str(model)) is None:
        return ""
    return (
        f"; or, if {model} is a model of the Hugging Face hub, download all of it into the "
        f"cache first: hf download {model}"
    )
