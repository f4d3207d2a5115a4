"""Random model that mostly repeats its last token, for tests of speculative decoding."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.models import make_model_directory

KEPT = 0.1
"""Scale of the layers' output: the last token's embedding dominates, so it stays the most
likely."""


def make_repeating_model(path: Path, architecture: str = "mistral", *, tied: bool = True) -> Path:
    """Write a model directory; return ``path``."""
    make_model_directory(path, architecture, tied=tied)
    file = path / "model.safetensors"
    state = load_file(file)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= KEPT
    save_file(state, file, metadata={"format": "pt"})
    return path
