"""Patches of elements for vLLM: their file, and the worker extension that applies them.

Each of vLLM's workers reads the file, if the server was started with ``--worker-extension-cls``
:data:`EXTENSION`, and applies it through vLLM's own ``checkpoint_weight_patch.py`` (0.29 or newer),
which maps names of the checkpoint to the parameters of its rank. The server's environment needs
this package, without its dependencies; vLLM is imported in its workers only.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

EXTENSION = "tidegate.engine.external.vllm_patches.PatchedWorker"
"""Value of vLLM's ``--worker-extension-cls``."""

RPC = "load_tidegate_patches"
"""Method of the extension that ``/collective_rpc`` calls."""

INDICES_MAX = 2**31
"""Limit of a tensor's elements, because vLLM's indices are int32."""


class TensorChange(NamedTuple):
    """New values of some elements of one tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    """[C], int32, in row-major order, each once."""
    values: torch.Tensor
    """[C], of the checkpoint's dtype."""


def write_changes(
    tensors: Mapping[str, torch.Tensor],
    changed: Mapping[str, Sequence[npt.NDArray[np.int64]]],
    file: Path,
) -> bool:
    """Write the values of ``tensors`` at the changed indices.

    ``changed`` has index arrays of each changed tensor; an element may be in several. Returns
    False, and writes nothing, if vLLM cannot apply the change: a name or dtype is not the
    checkpoint's, or a value is NaN, which vLLM reads as "unchanged".
    """
    columns: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, index_arrays in changed.items():
        tensor = tensors.get(name)
        if tensor is None or not tensor.is_floating_point() or tensor.numel() > INDICES_MAX:
            return False
        indices = torch.from_numpy(np.unique(np.concatenate(index_arrays)))
        values = tensor.view(-1)[indices]
        if values.isnan().any():
            return False
        columns[f"indices {name}"] = indices.to(torch.int32)
        columns[f"values {name}"] = values
        shapes[name] = list(tensor.shape)
    save_file(columns, file, metadata={"shapes": json.dumps(shapes)})
    return True


def read_changes(file: Path, device: str | torch.device) -> Iterator[TensorChange]:
    """Read a file of :func:`write_changes`."""
    with safe_open(file, framework="pt", device=str(device)) as columns:
        for name, shape in json.loads(columns.metadata()["shapes"]).items():
            indices = columns.get_tensor(f"indices {name}")
            values = columns.get_tensor(f"values {name}")
            yield TensorChange(name, tuple(shape), indices, values)


class PatchedWorker:
    """Mixed into vLLM's worker class by vLLM itself."""

    device: torch.device
    model_runner: Any
    vllm_config: Any

    def load_tidegate_patches(self, path: str) -> None:
        """Change elements of this rank's weights in place. A failure leaves them unknown."""
        if torch.version.cuda is None:
            raise NotImplementedError("only CUDA builds compute with the parameters as loaded")
        patch_loader = importlib.import_module(
            "vllm.model_executor.model_loader.checkpoint_weight_patch"
        )
        config = importlib.import_module("vllm.config")
        patches = [
            patch_loader.CheckpointWeightPatch(
                name=change.name,
                shape=change.shape,
                dtype=change.values.dtype,
                values=change.values,
                indices=change.indices,
            )
            for change in read_changes(Path(path), self.device)
        ]
        with config.set_current_vllm_config(self.vllm_config):
            patch_loader.load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
        torch.accelerator.synchronize()
