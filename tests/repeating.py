"""What do tests of guesses run on? A random model that mostly says again what it said last."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.models import make_model_directory

KEPT = 0.1
"""Of what layers add to the residual stream: its embedding stays the likeliest token's."""


def make_repeating_model(path: Path, architecture: str = "mistral") -> Path:
    """Write a model directory; return ``path``."""
    make_model_directory(path, architecture)
    file = path / "model.safetensors"
    state = load_file(file)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= KEPT
    save_file(state, file, metadata={"format": "pt"})
    return path
