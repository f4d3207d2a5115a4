"""Where does each published tensor go in a model that transformers computes? Into its own modules.

It knows nothing of steps or caches. One object is one version: a module, whose parameters are
overwritten in place. The LM head computes in float32 whatever the rest does, as in our own code.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidegate.engine.memory.memory import is_out_of_memory
from tidegate.engine.models.checkpoint import tensor_names
from tidegate.engine.models.model_weights import refuse_lacking
from tidegate.engine.weights.converted_places import (
    Conversion,
    converted_places,
    find_conversions,
)
from tidegate.engine.weights.weight_store import Place, WeightStore
from tidegate.errors import ModelError

CONTEXT_TOKENS_UNSAID = 32_768
"""Of models whose positions have no end. The KV cache has one."""

POSITIONS = re.compile(r"(^|[._])(wpe|embed_positions|position_embeddings?)$")
"""Names of modules that embed positions."""

CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
    "seq_length",
)
"""Fields of configs that say how long a context may be; an MPT's is ``max_seq_len``, a Whisper's
``max_target_positions``."""


class FallbackWeights(WeightStore):
    """All tensors of one version, in a module of transformers.

    They are taken by the names of the module's ``state_dict()`` and by those of the directory,
    which transformers converts where they differ.
    """

    def __init__(
        self,
        module: Any,
        aliases: dict[str, str],
        conversions: Sequence[Conversion] = (),
        passed_over: frozenset[str] = frozenset(),
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.module = module
        self._aliases = aliases
        """Names of tensors that are another one, tied; that one's name."""
        self._conversions = conversions
        self.passed_over = passed_over
        """Tensors of the directory that transformers' model has no use for, to be warned of."""
        self._ignored_names = ignored
        """Tensors of the directory that transformers ignores in every model of the kind, such as
        masks of old GPT-2s."""
        places, joint = converted_places(
            _places(module, aliases), conversions, stores_directory=False
        )
        super().__init__(type(module).__name__, places, joint=joint)

    @property
    def dtype(self) -> torch.dtype:
        """What everything but the head is computed in."""
        dtype: torch.dtype = self.module.dtype
        return dtype

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into its place; its name may have or lack the prefix of the base model.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        prefix = f"{self.module.base_model_prefix}."
        others = (name, prefix + name, name.removeprefix(prefix))
        super().load(next(filter(self._knows, others), name), tensor)

    def _knows(self, name: str) -> bool:
        return any(name in names for names in (self._places, self._joint_places, self._aliases))

    def is_redundant(self, name: str) -> bool:
        """Tell whether a tensor is another one, tied, or one that transformers passes over."""
        return any(
            name in names for names in (self._aliases, self.passed_over, self._ignored_names)
        )

    def tied_to(self, name: str) -> str | None:
        """The name that it is taken by."""
        return self._aliases.get(name)

    def twin(self) -> "FallbackWeights":
        """A second set in memory of its own, to be filled."""
        module = copy.deepcopy(self.module)
        return FallbackWeights(
            module, self._aliases, self._conversions, self.passed_over, self._ignored_names
        )


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
    refuse_other_tasks(path, config)
    for name, what in (
        ("is_encoder_decoder", "has an encoder"),
        ("quantization_config", "is quantised"),
        ("use_bidirectional_attention", "attends to later tokens"),
    ):
        if getattr(config, name, None) or getattr(text, name, None):
            raise ModelError(f"{path} {what} ({name}); such a model can't be served by this engine")
    return config


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How names of classes that have an LM head end; a few more are in transformers' own table."""


def refuse_other_tasks(path: Path, config: Any) -> None:
    """Refuse a directory whose weights belong to a class that has no LM head.

    ``AutoModelForCausalLM`` loads it all the same, with the LM head left random or tied.

    Raises:
        ModelError: no class that ``architectures`` names is one that continues text.
    """
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = list(config.architectures or ())
    if not named or any(name in known for name in named):
        return
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if any(name.endswith(CAUSAL) for name in named):
        return
    raise ModelError(
        f"{path} is a {', '.join(named)}, which has no LM head, so no text can be sampled from it. "
        f"Serve a causal language model"
        + (f", such as a {own} of the same kind" if own else "")
        + "; rewards and embeddings come from sequence classifiers of the families that Tidegate's "
        "own code computes (tidegate.score_server)"
    )


def context_tokens_max(config: Any) -> int:
    """Return how long contexts may be: as the config says, or 32,768 where it has no limit.

    A ``longrope`` turns all positions otherwise once a context is longer than the original one, and
    keys cached before would be wrong; so contexts end there.
    """
    said = _said_context_tokens(config)
    limits = [CONTEXT_TOKENS_UNSAID if said is None else said]
    return min(limits + _longrope_limits(config))


def learned_positions(module: Any) -> list[int]:
    """Return for how many positions each table of learned positions has an embedding.

    A longer context would end in an IndexError. Some tables begin with rows that no position has:
    an ``offset`` of them (BART, OPT), or all up to that of the padding token (RoBERTa).
    """
    found = []
    for name, table in module.named_modules():
        if isinstance(table, torch.nn.Embedding) and POSITIONS.search(name):
            padding = 0 if table.padding_idx is None else table.padding_idx + 1
            found.append(table.num_embeddings - int(getattr(table, "offset", padding)))
    return found


def shortened_context(config: Any) -> list[str]:
    """Say that contexts end before the model's own limit, if they do."""
    said, limit = _said_context_tokens(config), context_tokens_max(config)
    if said is None or said <= limit:
        return []
    return [
        f"Contexts end at {limit} of the {said} tokens that config.json allows: its longrope turns "
        f"all positions otherwise beyond {limit}, and cached keys would be wrong"
    ]


def _said_context_tokens(config: Any) -> int | None:
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in CONTEXT_FIELDS)
    return next((int(tokens) for tokens in found if tokens is not None), None)


def _longrope_limits(config: Any) -> list[int]:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = (rope, *(nested for nested in rope.values() if isinstance(nested, dict)))
    return [
        int(part["original_max_position_embeddings"])
        for part in parts
        if part.get("rope_type") == "longrope"
    ]


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
    conversions = find_conversions(module, [n for n in module.state_dict() if n not in aliases])
    passed_over = frozenset(info["unexpected_keys"])
    patterns = module._keys_to_ignore_on_load_unexpected or ()
    ignored = frozenset(
        name for name in tensor_names(path) if any(re.search(p, name) for p in patterns)
    )
    return FallbackWeights(module, aliases, conversions, passed_over, ignored)


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
