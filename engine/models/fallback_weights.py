"""Where does each published tensor go in a model that transformers computes? Into its own modules.

It knows nothing of steps or caches. One object is one version: a module, whose parameters are
overwritten in place. The LM head computes in float32 whatever the rest does, as in our own code.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from tidegate.engine.memory.memory import is_out_of_memory
from tidegate.engine.weights.weight_store import Place, WeightStore
from tidegate.engine.weights.weights import refuse_lacking
from tidegate.errors import ModelError

CONTEXT_TOKENS_UNSAID = 32_768
"""Of models whose positions have no end. The KV cache has one."""


class FallbackWeights(WeightStore):
    """All tensors of one version, in a module of transformers."""

    def __init__(self, module: Any, aliases: dict[str, str]) -> None:
        self.module = module
        self._aliases = aliases
        """Names of tensors that are another one, tied; that one's name."""
        super().__init__(type(module).__name__, _places(module, aliases))

    @property
    def dtype(self) -> torch.dtype:
        """What everything but the head is computed in."""
        dtype: torch.dtype = self.module.dtype
        return dtype

    def is_redundant(self, name: str) -> bool:
        """Tied tensors are taken by one of their names."""
        return name in self._aliases

    def tied_to(self, name: str) -> str | None:
        """The name that it is taken by."""
        return self._aliases.get(name)

    def twin(self) -> "FallbackWeights":
        """A second set in memory of its own, to be filled."""
        return FallbackWeights(copy.deepcopy(self.module), self._aliases)


def read_config(path: Path) -> Any:
    """Read what transformers makes of config.json.

    Raises:
        ModelError: it knows no such model, or one that can't be sampled from as a rollout needs it.
    """
    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"transformers can't read {path}: {_first_line(error)}") from error
    text = config.get_text_config()
    for name, what in (
        ("is_encoder_decoder", "has an encoder"),
        ("quantization_config", "is quantised"),
        ("use_bidirectional_attention", "attends to later tokens"),
    ):
        if getattr(config, name, None) or getattr(text, name, None):
            raise ModelError(f"{path} {what} ({name}); such a model can't be served by this engine")
    return config


def context_tokens_max(config: Any) -> int:
    """How long contexts may be: as the config says, or as long as can be where it has no limit.

    A ``longrope`` turns all positions otherwise once a context is longer than the original one, and
    keys cached before would be wrong; so it ends there.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # an MPT's is the latter
    said = next((n for name in names if (n := getattr(text, name, None)) is not None), None)
    limits = [CONTEXT_TOKENS_UNSAID if said is None else int(said)]
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        if part.get("rope_type") == "longrope":
            limits.append(int(part["original_max_position_embeddings"]))
    return min(limits)


def load_fallback(path: Path, dtype: torch.dtype) -> FallbackWeights:
    """Load the weights of a Hugging Face directory into the module that transformers has for it.

    Raises:
        ModelError: transformers can't make a causal language model of it from its own code, or
            files are missing or damaged.
    """
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with _no_progress_bars():
            module, info = auto.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"transformers can't load {path}: {_first_line(error)}") from error
    lacking = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    refuse_lacking(path, sorted(lacking))
    aliases = _aliases(module)
    module.eval().requires_grad_(False)
    _widen_head(module)
    return FallbackWeights(module, aliases)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """An engine's stderr is for what went wrong."""
    log: Any = transformers.utils.logging
    had_bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            log.enable_progress_bar()


class _Float32Head(torch.nn.Module):
    """A linear layer that computes in float32 whatever it is given."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None
        if head.bias is not None:
            self.bias = torch.nn.Parameter(head.bias.detach().float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight, self.bias)


def _widen_head(module: Any) -> None:
    head = module.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.weight.dtype != torch.float32:
        module.set_output_embeddings(_Float32Head(head))


def _aliases(module: Any) -> dict[str, str]:
    """Which names are of a tensor that an earlier name is of."""
    first: dict[tuple[int, torch.Size], str] = {}
    aliases = {}
    for name, tensor in module.state_dict().items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if known != name:
            aliases[name] = known
    return aliases


def _places(module: Any, aliases: dict[str, str]) -> dict[str, Place]:
    """One for each tensor of the module; a head tied to the embedding is filled along with it."""
    tensors: dict[str, torch.Tensor] = module.state_dict()
    targets = {name: [tensor] for name, tensor in tensors.items() if name not in aliases}
    for alias, name in aliases.items():
        if tensors[alias].data_ptr() != tensors[name].data_ptr():
            targets[name].append(tensors[alias])
    return {name: Place(tuple(where[0].shape), tuple(where)) for name, where in targets.items()}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
