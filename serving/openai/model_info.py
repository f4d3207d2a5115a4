"""Facts of the served model: tensors and their names, adapters, versions, limits, defaults.

Read from configs and safetensors headers, without the weights. Imports torch and transformers only
if a trainer uses other tensor names than the model directory.
"""

import bisect
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ModelError
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.weight_sync.tensor_files import read_header
from tidegate.serving.http.errors import ApiError
from tidegate.transport.regular_files import open_regular
from tidegate.transport.weight_names import NameGroup, name_groups

if TYPE_CHECKING:
    from tidegate.orchestrator.fleet.fleet import Fleet

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Some trainers send the head though it is the embedding; tied models' directories lack it."""

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Dtypes by safetensors' names, as torch's names."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Dtype and shape of a tensor of the model directory."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformersNames:
    """Names that transformers gives the tensors of a model directory, in its ``state_dict()``.

    Trainers send tensors under these names, or under those of the directory.
    """

    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor, by its name in the ``state_dict()`` and in directories."""
    groups: dict[str, NameGroup]
    """Tensors that are converted together when a directory is loaded, by all of their names."""
    tied: dict[str, str]
    """Name of the tensor that a tied tensor equals, by the tied tensor's name."""
    passed_over: tuple[str, ...]
    """Patterns of tensor names in directories that the model does not load."""
    prefix: str
    """Prefix of the base model's tensor names; some directories omit it."""

    def canonical(self, name: str) -> str:
        """Return the name of a tensor in transformers' model with its LM head."""
        for other in (name, self.prefix + name, name.removeprefix(self.prefix)):
            if other in self.shapes:
                return other
        return name

    def covered(self, names: set[str]) -> set[str]:
        """Return all names of the tensors that ``names`` determine."""
        found = set(names)
        for group in {id(group): group for group in self.groups.values()}.values():
            if found.issuperset(group.state) or found.issuperset(group.directory):
                found.update(group.state, group.directory)
        found.update(alias for alias, name in self.tied.items() if name in found)
        return found

    def is_passed_over(self, name: str) -> bool:
        """Whether a directory may hold a tensor of this name that the model does not load."""
        return any(re.search(pattern, name) for pattern in self.passed_over)


@dataclass
class ModelInfo:
    """The served model: its name for clients, its tensors and its adapters."""

    path: Path
    name: str
    tensors: dict[str, TensorFacts]
    """Tensors of the directory, by the names there."""
    dtype: str
    """Dtype in which engines hold most tensors."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each with its directory."""

    @cached_property
    def transformers_names(self) -> "TransformersNames":
        """Names that transformers gives the directory's tensors; read once, which takes seconds."""
        return _read_transformers_names(self.path)

    def facts_of(self, name: str) -> TensorFacts | None:
        """Return dtype and shape of a tensor, by the directory's or the ``state_dict()``'s name.

        None: the model has no such tensor. The head of a model that ties it counts as one: engines
        refuse it unless it equals the embedding, which they compute with.
        """
        facts = self.tensors.get(name)
        if facts is None and name == HEAD:
            facts = self.tensors.get(EMBEDDING)
        if facts is None:
            other = self.transformers_names
            shape = other.shapes.get(other.canonical(name))
            facts = None if shape is None else TensorFacts(self.stored_dtype(name), shape)
        return facts

    def stored_dtype(self, name: str) -> str:
        """Return a tensor's dtype in the directory, or that of the tensors it combines."""
        other = self.transformers_names
        wanted = other.canonical(name)
        group = other.groups.get(wanted)
        same = {wanted} if group is None else {*group.state, *group.directory}
        found = [f.dtype for n, f in self.tensors.items() if other.canonical(n) in same]
        return found[0] if found else self.dtype

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Return the directory's tensors that ``names`` (of either kind) do not cover."""
        given = set(names)
        left = [name for name in self.tensors if name not in given]
        if not left:
            return []
        other = self.transformers_names
        covered = other.covered({other.canonical(name) for name in given})
        wanted = [
            name for name in left if not other.shapes or other.canonical(name) in other.shapes
        ]
        return [name for name in wanted if other.canonical(name) not in covered]

    def known_also_as(self, names: Iterable[str]) -> set[str]:
        """Return the other names of the tensors that ``names`` determine."""
        given = set(names)
        return self.transformers_names.covered(given) - given

    def knows(self, name: str) -> bool:
        """Whether the model or an adapter has this name."""
        return name == self.name or name in self.adapters

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter of a request's model name; empty: the model itself.

        Raises:
            ApiError: no model or adapter has this name.
        """
        if self.knows(model or self.name):
            return model if model in self.adapters else ""
        raise ApiError(
            404,
            f"The model `{model}` does not exist. Valid aliases: "
            f"{', '.join([self.name, *self.adapters])}.",
            param="model",
        )

    def listed(self, *, created_s: int, context_tokens_max: int) -> dict[str, Any]:
        """Return the body of ``/v1/models``."""

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
    """Read the facts of a model directory; ``dtype`` is the run's setting for its engines.

    Raises:
        ModelError: a file can't be read.
    """
    tensors: dict[str, TensorFacts] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= _header(file)
    if dtype == "auto":
        dtypes = [facts.dtype for facts in tensors.values()]
        dtype = max(set(dtypes), key=dtypes.count, default="float32")
    return ModelInfo(path, name or str(path), tensors, dtype)


def _read_transformers_names(path: Path) -> TransformersNames:
    """Read names off transformers' model of a directory; empty if transformers can't load it."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    configs: Any = transformers.AutoConfig
    models: Any = transformers.AutoModelForCausalLM
    try:
        config = configs.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = models.from_config(config, trust_remote_code=False)
    except Exception:  # noqa: BLE001  (the directory's own names are all there are then)
        return TransformersNames({}, {}, {}, (), "")
    tensors: dict[str, torch.Tensor] = module.state_dict()
    tied = {n: t for n, t in module.all_tied_weights_keys.items() if n in tensors}

    def reverted(names: Sequence[str]) -> list[str]:
        try:
            return list(revert_weight_conversion(module, {n: tensors[n] for n in names}))
        except Exception:  # noqa: BLE001  (no reverse is known)
            return list(names)

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    groups: dict[str, NameGroup] = {}
    for group in name_groups([name for name in tensors if name not in tied], reverted):
        made = revert_weight_conversion(module, {name: tensors[name] for name in group.state})
        shapes |= {name: tuple(tensor.shape) for name, tensor in made.items()}
        groups |= dict.fromkeys((*group.state, *group.directory), group)
    ignored = tuple(module._keys_to_ignore_on_load_unexpected or ())
    return TransformersNames(shapes, groups, tied, ignored, f"{module.base_model_prefix}.")


GENERATION_CONFIG = "generation_config.json"

SAMPLING_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
"""Fields of generation_config.json that vLLM reads."""


def read_sampling_defaults(path: Path) -> dict[str, float]:
    """Read the sampling defaults of a model directory's generation_config.json, if it has one.

    Raises:
        ModelError: the file can't be read, or a default is no number.
    """
    file = path / GENERATION_CONFIG
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{file} must hold a JSON object, and holds a {type(content).__name__}; download the "
            "model again"
        )
    found = {name: content[name] for name in SAMPLING_DEFAULTS if content.get(name) is not None}
    for name, value in found.items():
        kind = int if name in ("top_k", "max_new_tokens") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ModelError(
                f"{file} has {name}={value!r}, which is no number for it; correct the file, or "
                f"start the server with generation_config='vllm' to ignore it"
            )
    return found


def _header(file: Path) -> dict[str, TensorFacts]:
    try:
        fd = open_regular(file)
        try:
            header, _ = read_header(fd)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
    return {
        name: TensorFacts(DTYPES.get(facts["dtype"], facts["dtype"]), tuple(facts["shape"]))
        for name, facts in header.items()
    }


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that all engines of a run share."""

    context_tokens_max: int
    vocab_size: int


def limits_of(fleet: "Fleet") -> Limits:
    """Return the lowest limits of the engines that are connected.

    Raises:
        ApiError: no engine is connected.
    """
    hellos = [engine.hello for engine in fleet.engines.values()]
    if not hellos:
        raise ApiError(503, "no engine is there now; retry later")
    return Limits(
        min(min(h.context_tokens_max, h.num_kv_blocks * h.block_tokens) for h in hellos),
        min(hello.vocab_size for hello in hellos),
    )


# ---------------------------------------------------------------- weight versions

FIRST_LABEL = "default"
"""Name of the model directory's own weights, as in vLLM."""


class VersionLabels:
    """Names that clients give to weight versions.

    The run counts versions; clients name them. A version without a name of its own has that of the
    version before. A name is of weights, not of a moment: renaming what is served also renames the
    versions of tokens sampled by it.
    """

    def __init__(self) -> None:
        self._named: tuple[tuple[int, str], ...] = ((0, FIRST_LABEL),)
        """Versions and their labels, in order. Replaced as a whole: threads read it."""

    @property
    def newest(self) -> str:
        """Label of the weights that are served, or about to be."""
        return self._named[-1][1]

    def name(self, version: int, label: str) -> None:
        """Give a label to this version, and to later ones without their own."""
        self._named = tuple(sorted({**dict(self._named), version: label}.items()))

    def forget(self, version: int) -> None:
        """Drop the label of a version that no engine serves, nor ever will."""
        self._named = tuple(each for each in self._named if each[0] == 0 or each[0] != version)

    def of(self, version: int) -> str:
        """Return the label of a version."""
        named = self._named
        return named[bisect.bisect_right(named, version, key=lambda each: each[0]) - 1][1]

    def spans(self, turn: GeneratedTurn | None) -> list[dict[str, Any]]:
        """Return the labels of a turn's tokens as spans: gapless, in order, neighbours differ."""
        spans: list[dict[str, Any]] = []
        for span in turn.spans if turn is not None else ():
            label = self.of(span.version)
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = span.end
            else:
                spans.append({"version": label, "start": span.start, "end": span.end})
        return spans
