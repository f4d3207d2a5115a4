"""One weight version of a transformers model, and checks whether transformers can serve a model.

Published tensors overwrite the module's parameters in place. The LM head computes in float32
whatever the dtype, as in Tidegate's own models.
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidegate.engine.memory.out_of_memory import is_out_of_memory
from tidegate.engine.models.checkpoint import tensor_names
from tidegate.engine.models.model_weights import refuse_lacking
from tidegate.engine.models.quiet_transformers import quiet_transformers
from tidegate.engine.weights.weight_conversions import (
    Conversion,
    auto_class,
    converted_targets,
    find_conversions,
)
from tidegate.engine.weights.weight_store import CopyTarget, WeightStore
from tidegate.errors import ModelError

CONTEXT_TOKENS_DEFAULT = 32_768
"""Context limit in tokens of models whose config states none; the KV cache needs a limit."""

POSITIONS = re.compile(r"(^|[._])(wpe|embed_positions|position_embeddings?)$")
"""Matches the names of modules that are tables of learned position embeddings."""

CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
    "seq_length",
)
"""Config fields that hold the context limit; an MPT's is ``max_seq_len``, a Whisper's
``max_target_positions``."""


class FallbackWeights(WeightStore):
    """All tensors of one version, in a transformers module.

    Tensors are accepted under the module's ``state_dict()`` names and under the model directory's
    names. Where the two differ, tensors are converted as transformers does on loading.
    """

    def __init__(
        self,
        module: Any,
        aliases: dict[str, str],
        conversions: Sequence[Conversion] = (),
        unused_names: frozenset[str] = frozenset(),
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.module = module
        self._aliases = aliases
        """Names of tied tensors, each with the name of the tensor that it shares."""
        self._conversions = conversions
        self.unused_names = unused_names
        """Tensors of the directory that the transformers model does not use; the engine warns about
        them."""
        self._ignored_names = ignored
        """Tensors of the directory that transformers ignores in all models of this class, such as
        the masks of old GPT-2s."""
        copy_targets, joint_targets = converted_targets(
            _copy_targets(module, aliases), conversions, stores_directory=False
        )
        super().__init__(type(module).__name__, copy_targets, joint=joint_targets)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of everything but the head."""
        dtype: torch.dtype = self.module.dtype
        return dtype

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the module; ``name`` may lack or have the base model's prefix.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        prefix = f"{self.module.base_model_prefix}."
        spellings = (name, prefix + name, name.removeprefix(prefix))
        super().load(next(filter(self._has_target, spellings), name), tensor)

    def _has_target(self, name: str) -> bool:
        return any(
            name in names for names in (self._copy_targets, self._joint_targets, self._aliases)
        )

    def is_redundant(self, name: str) -> bool:
        """Whether a tensor is tied to another one, or ignored by transformers."""
        return any(
            name in names for names in (self._aliases, self.unused_names, self._ignored_names)
        )

    def tied_to(self, name: str) -> str | None:
        """Return the name of the tensor that ``name`` is tied to."""
        return self._aliases.get(name)

    def allocate_copy(self) -> "FallbackWeights":
        """Return a second version in memory of its own."""
        module = copy.deepcopy(self.module)
        return FallbackWeights(
            module, self._aliases, self._conversions, self.unused_names, self._ignored_names
        )


def read_config(path: Path) -> Any:
    """Read config.json with transformers.

    Raises:
        ModelError: transformers does not know the model, or it cannot be sampled for rollouts.
    """
    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"transformers can't read the config of {path}: {_first_line(error)}. Download or save "
            "the model again; newer models may need a newer transformers"
        ) from error
    text = config.get_text_config()
    refuse_other_tasks(path, config)
    for name, reason in (
        ("is_encoder_decoder", "has an encoder"),
        ("quantization_config", "is quantised"),
        ("use_bidirectional_attention", "attends to later tokens"),
    ):
        if getattr(config, name, None) or getattr(text, name, None):
            raise ModelError(
                f"{path} {reason} ({name} is set in config.json), so its tokens can't be sampled "
                "one by one; serve a causal model"
            )
    return config


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Suffixes of class names with an LM head; transformers' own table has a few more."""


def refuse_other_tasks(path: Path, config: Any) -> None:
    """Refuse a directory whose class has no LM head.

    ``AutoModelForCausalLM`` would load it with a random or tied LM head.

    Raises:
        ModelError: no class in ``architectures`` is a causal language model.
    """
    first_name = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = list(config.architectures or ())
    if not named or any(name in first_name for name in named):
        return
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if any(name.endswith(CAUSAL) for name in named):
        return
    raise ModelError(
        f"{path} is a {', '.join(named)}, which has no LM head, so no token can be sampled. "
        f"Serve a causal language model"
        + (f", such as a {causal} of the same kind" if causal else "")
        + "; rewards and embeddings come from sequence classifiers of the families that Tidegate's "
        "own code computes (tidegate.score_server)"
    )


def context_tokens_max(config: Any) -> int:
    """Return the context limit in tokens: 32,768 if the config has no limit.

    A ``longrope`` changes the rotation of all positions once a context exceeds the original length,
    which would invalidate cached keys; so the original length is the limit. Beyond Doge's
    ``keep_window_size``, a whole forward pass attends to other positions than a token by token one.
    """
    stated = _stated_context_tokens(config)
    limits = [CONTEXT_TOKENS_DEFAULT if stated is None else stated]
    return min(limits + _longrope_limits(config) + _kept_window(config))


def learned_positions(module: Any) -> list[int]:
    """Return the number of positions in each table of learned position embeddings.

    A longer context would raise IndexError. Some tables start with unused rows: an ``offset``
    (BART, OPT), or all rows up to the padding token's (RoBERTa).
    """
    found = []
    for name, table in module.named_modules():
        if isinstance(table, torch.nn.Embedding) and POSITIONS.search(name):
            padding = 0 if table.padding_idx is None else table.padding_idx + 1
            found.append(table.num_embeddings - int(getattr(table, "offset", padding)))
    return found


def shortened_context(config: Any) -> list[str]:
    """Return a warning if contexts are limited to less than the config allows."""
    stated, limit = _stated_context_tokens(config), context_tokens_max(config)
    if stated is None or stated <= limit:
        return []
    reason = (
        "a forward pass of the whole context chooses other positions to attend to"
        if limit in _kept_window(config)
        else f"its longrope turns all positions differently beyond {limit}, and cached keys would "
        "be wrong"
    )
    return [f"Contexts end at {limit} of the {stated} tokens that config.json allows: {reason}"]


def _stated_context_tokens(config: Any) -> int | None:
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in CONTEXT_FIELDS)
    return next((int(tokens) for tokens in found if tokens is not None), None)


def _kept_window(config: Any) -> list[int]:
    """Return the number of positions that Doge's dynamic mask keeps; empty for other models."""
    window = getattr(config.get_text_config(), "keep_window_size", None)
    return [] if window is None else [int(window)]


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
    """Load a Hugging Face directory into its transformers module.

    Raises:
        ModelError: transformers' own code has no causal language model for it, or files are missing
            or damaged.
    """
    config = read_config(path)
    try:
        with quiet_transformers():
            module, info = auto_class(config).from_pretrained(
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
        raise ModelError(
            f"transformers can't load {path}: {_first_line(error)}. Download or save the model "
            "again; newer models may need a newer transformers"
        ) from error
    missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    refuse_lacking(path, sorted(missing))
    aliases = _aliases(module)
    module.eval().requires_grad_(False)
    clamp_time_steps(module)
    _widen_head(module)
    conversions = find_conversions(module, [n for n in module.state_dict() if n not in aliases])
    unused_names = frozenset(info["unexpected_keys"])
    patterns = module._keys_to_ignore_on_load_unexpected or ()
    ignored = frozenset(
        name for name in tensor_names(path) if any(re.search(p, name) for p in patterns)
    )
    return FallbackWeights(module, aliases, conversions, unused_names, ignored)


class _ClampedSoftplus(TorchFunctionMode):
    """Clamps the results of ``softplus``."""

    def __init__(self, limit: tuple[float, float]) -> None:
        super().__init__()
        self._limit = limit

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clamp(*self._limit) if func is F.softplus else result


def clamp_time_steps(module: torch.nn.Module) -> None:
    """Clamp the time steps of Mamba-2's layers in every forward pass, as in one of many tokens.

    ``transformers`` clamps them to ``time_step_limit`` where it reads several tokens, as trainers
    do, and not where it reads one, so the log-probs of sampled tokens would differ by up to .07.
    A time step is the mixer's only ``softplus``.
    """
    mixer: Any
    for mixer in module.modules():
        limit = getattr(mixer, "time_step_limit", None)
        if limit is None or (limit[0] <= 0 and limit[1] == math.inf):
            continue
        mixer.open_clamps = []  # of the module, so that a copy has its own

        def enter(mixer: Any, _: Any) -> None:
            clamp: Any = _ClampedSoftplus(mixer.time_step_limit)
            clamp.__enter__()
            mixer.open_clamps.append(clamp)

        def leave(mixer: Any, _: Any, __: Any) -> None:
            if mixer.open_clamps:  # empty if another hook has failed before ``enter``
                mixer.open_clamps.pop().__exit__(None, None, None)

        mixer.register_forward_pre_hook(enter)
        mixer.register_forward_hook(leave, always_call=True)


class _Float32Head(torch.nn.Module):
    """Linear layer that computes in float32 for any input dtype."""

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
    """Return the names of tensors that share memory with an earlier name."""
    names: dict[object, str] = {}
    aliases = {}
    for name, tensor in module.state_dict().items():
        view = (tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape)
        first_name = names.setdefault(view, name)
        if first_name != name:
            aliases[name] = first_name
    return aliases


def _copy_targets(module: Any, aliases: dict[str, str]) -> dict[str, CopyTarget]:
    """Return the copy target of each tensor of the module. A head that is tied to the embedding but
    stored separately gets every tensor that the embedding gets."""
    tensors: dict[str, torch.Tensor] = module.state_dict()
    targets = {name: [tensor] for name, tensor in tensors.items() if name not in aliases}
    for alias, name in aliases.items():
        if tensors[alias].data_ptr() != tensors[name].data_ptr():
            targets[name].append(tensors[alias])
    return {
        name: CopyTarget(tuple(tensors[0].shape), tuple(tensors))
        for name, tensors in targets.items()
    }


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
