"""Which model do the engines serve? Its name, its limits, the names of its tensors, its adapters.

What is read here is small: configs and headers. It reads no weights, and imports no torch.
"""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ModelError
from tidegate.orchestrator.vllm_server.failures import ServerError

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler import Scheduler

HEADER_BYTES_MAX = 100 * 2**20
"""Of a safetensors file, by its format."""

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""safetensors' names, and torch's."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of the model directory."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class ModelInfo:
    """The model, as clients name it, and its adapters."""

    path: Path
    name: str
    tensors: dict[str, TensorFacts]
    """By name, as checkpoints call them."""
    dtype: str
    """What engines hold most of them in."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each with its directory."""

    def adapter_of(self, model: str | None) -> str:
        """The adapter that requests for this model name are sampled with; empty: none.

        Raises:
            ServerError: there is no such model.
        """
        if model is None or model in ("", self.name):
            return ""
        if model in self.adapters:
            return model
        raise ServerError(
            404,
            f"The model `{model}` does not exist. Valid aliases: "
            f"{', '.join([self.name, *self.adapters])}.",
            param="model",
        )

    def listed(self, *, created_s: int, context_tokens_max: int) -> dict[str, Any]:
        """The body of ``/v1/models``."""

        def card(name: str, root: str, parent: str | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "tidegate",
                "root": root,
                "parent": parent,
                "max_model_len": context_tokens_max if parent is None else None,
                "permission": [],
            }

        cards = [card(self.name, str(self.path), None)]
        cards += [card(name, root, self.name) for name, root in self.adapters.items()]
        return {"object": "list", "data": cards}


def read_model_info(path: Path, *, name: str | None, dtype: str) -> ModelInfo:
    """What a model directory's files say; ``dtype`` is what engines were told to use.

    Raises:
        ModelError: they can't be read.
    """
    tensors: dict[str, TensorFacts] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= _header(file)
    if dtype == "auto":
        dtypes = [facts.dtype for facts in tensors.values()]
        dtype = max(set(dtypes), key=dtypes.count, default="float32")
    return ModelInfo(path, name or str(path), tensors, dtype)


def _header(file: Path) -> dict[str, TensorFacts]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, HEADER_BYTES_MAX)))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
    return {
        name: TensorFacts(DTYPES.get(facts["dtype"], facts["dtype"]), tuple(facts["shape"]))
        for name, facts in header.items()
        if name != "__metadata__"
    }


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine can take."""

    context_tokens_max: int
    vocab_size: int


def limits_of(scheduler: "Scheduler") -> Limits:
    """Of the engines that are there.

    Raises:
        ServerError: there are none.
    """
    hellos = [engine.hello for engine in scheduler.fleet.engines.values()]
    if not hellos:
        raise ServerError(503, "no engine is there now; retry later")
    return Limits(
        min(min(h.context_tokens_max, h.num_blocks * h.block_tokens) for h in hellos),
        min(hello.vocab_size for hello in hellos),
    )
