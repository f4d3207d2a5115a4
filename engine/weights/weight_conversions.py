"""Accepts published tensors under both naming schemes of a model, as transformers converts them.

An engine stores a model under one scheme: the transformers fallback under the names of
``state_dict()``, external engines under those of the directory. Trainers publish under either. The
conversion that transformers applies on loading is not reimplemented: it is run on tensors of
element indices, and the result shows where each published tensor is stored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tidegate.engine.weights.weight_store import CopyTarget
from tidegate.transport.images import MODEL_TYPES
from tidegate.transport.weight_names import NameGroup, name_groups

INT32_MAX = 2**31 - 1

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StridedTensorView:
    """A strided view of another, contiguous tensor."""

    base: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Return the view of ``base``."""
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the tensors of a name group are views of each other."""

    group: NameGroup
    shapes: dict[str, Shape]
    """Shapes of the tensors, by the names of both schemes."""
    inner: dict[str, StridedTensorView]
    """Slice of each tensor of one scheme in a tensor of the other."""
    inner_is_directory: bool

    def renamed(self, group: NameGroup) -> "Conversion":
        """Return the same conversion for another layer's group."""
        old = (*self.group.state, *self.group.directory)
        names = dict(zip(old, (*group.state, *group.directory), strict=True))
        inner = {
            names[n]: StridedTensorView(names[s.base], s.shape, s.strides, s.offset)
            for n, s in self.inner.items()
        }
        shapes = {names[name]: shape for name, shape in self.shapes.items()}
        return Conversion(group, shapes, inner, self.inner_is_directory)


class _SplitTarget:
    """Copy target that splits a tensor: each slice goes to targets of its own."""

    def __init__(self, slices: Sequence[tuple[StridedTensorView, Sequence[Any]]]) -> None:
        self._slices_to_targets = slices

    def copy_(self, source: torch.Tensor, /) -> None:
        source = source.contiguous()
        for view, targets in self._slices_to_targets:
            for target in targets:
                target.copy_(view.of(source))

    def take_over(self, other: Any, /) -> None:
        raise AssertionError("take over the parts by their own names")

    element_dtype = None
    is_rounded = False

    def add_bits(self, index: torch.Tensor, difference: torch.Tensor) -> bool:
        raise ValueError("it is stored in parts")

    def unpacked(self) -> torch.Tensor:
        raise ValueError("it is stored in parts")

    def storages(self) -> list[torch.Tensor]:
        return []  # the parts have their own


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes and loads the model of a config with an LM
    head."""
    reads_images = config.model_type in MODEL_TYPES
    models: Any = transformers
    return models.AutoModelForImageTextToText if reads_images else models.AutoModelForCausalLM


def meta_model(path: Path) -> Any | None:
    """Make the transformers model of a directory on the meta device, without weights;
    None on failure."""
    configs: Any = transformers.AutoConfig
    try:
        config = configs.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=False)
    except Exception:  # noqa: BLE001  (then tensors are accepted by their stored names only)
        return None


def find_conversions(module: Any, names: Sequence[str]) -> list[Conversion]:
    """Find how transformers converts the tensors ``names`` of a module that it made.

    Tries the conversions that loaded the directory, then all that transformers declares for the
    model. A group that is converted in other ways than slicing, concatenating and transposing is
    omitted: its tensors are accepted by their ``state_dict()`` names only.
    """
    meta = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    conversions: list[Conversion] = []
    known_names = set(meta)
    for uses_default in (False, True):
        cache: dict[object, Conversion | None] = {}
        with _conversions_of(module, uses_default=uses_default):
            for group in name_groups(names, lambda some: _reverted_names(module, meta, some)):
                if known_names.intersection(group.directory):
                    continue
                key = _pattern(group, meta)
                if key not in cache:
                    cache[key] = _conversion(module, group, meta)
                conversion = cache[key]
                if conversion is not None:
                    conversions.append(conversion.renamed(group))
                    known_names.update(group.directory)
    return conversions


def converted_targets(
    stored: Mapping[str, CopyTarget], conversions: Sequence[Conversion], *, stores_directory: bool
) -> tuple[dict[str, CopyTarget], dict[str, CopyTarget]]:
    """Return the copy targets of the smallest tensors, and joint targets of tensors that cover
    several.

    ``stored`` has the copy target of each tensor under one scheme: the directory's or the
    ``state_dict()``'s. Its targets are tensors.
    """
    targets, joint_targets = dict(stored), {}
    for conversion in conversions:
        group, inner = conversion.group, conversion.inner
        stored_names, other_names = group.state, group.directory
        if stores_directory:
            stored_names, other_names = other_names, stored_names
        if any(name not in targets for name in stored_names) or any(
            n in joint_targets for n in (*stored_names, *other_names)
        ):
            continue
        if not all(_is_contiguous(stored[name]) for name in stored_names):
            continue
        if conversion.inner_is_directory == stores_directory:
            for base in other_names:
                covers = tuple(name for name in stored_names if inner[name].base == base)
                slices = [(inner[name], stored[name].targets) for name in covers]
                joint_targets[base] = CopyTarget(
                    conversion.shapes[base], (_SplitTarget(slices),), covers
                )
            continue
        for name in stored_names:
            tensors: Any = stored[name].targets
            parts = {n: inner[n] for n in other_names if inner[n].base == name}
            views = {
                n: CopyTarget(part.shape, tuple(part.of(tensor) for tensor in tensors))
                for n, part in parts.items()
            }
            if len(views) == 1:  # the same tensor by another name
                ((other_name, target),) = views.items()
                joint_targets[other_name] = CopyTarget(target.shape, target.targets, covers=(name,))
            else:
                joint_targets[name] = CopyTarget(stored[name].shape, tensors, covers=tuple(views))
                targets = _replace_with_parts(targets, name, views)
    return targets, joint_targets


def _is_contiguous(target: CopyTarget) -> bool:
    return all(isinstance(t, torch.Tensor) and t.is_contiguous() for t in target.targets)


def _replace_with_parts(
    targets: Mapping[str, CopyTarget], name: str, parts: Mapping[str, CopyTarget]
) -> dict[str, CopyTarget]:
    """Replace ``name`` with ``parts``, keeping the model's order."""
    converted: dict[str, CopyTarget] = {}
    for other, target in targets.items():
        converted |= parts if other == name else {other: target}
    return converted


@contextmanager
def _conversions_of(module: Any, *, uses_default: bool) -> Iterator[None]:
    """Make transformers convert as when it loaded the module, or with its defaults."""
    missing = object()
    saved = getattr(module, "_weight_conversions", missing)
    if uses_default and saved is not missing:
        module._weight_conversions = None
    try:
        yield
    finally:
        if saved is not missing:
            module._weight_conversions = saved


def _reverted_names(
    module: Any, tensors: Mapping[str, torch.Tensor], names: Sequence[str]
) -> list[str]:
    try:
        return list(revert_weight_conversion(module, {name: tensors[name] for name in names}))
    except Exception:  # noqa: BLE001  (no reverse is known; then there are no other names)
        return list(names)


def _pattern(group: NameGroup, tensors: Mapping[str, torch.Tensor]) -> object:
    """Return a key that is equal for the groups of layers that are converted alike."""
    names = tuple(re.sub(r"\d+", "#", name) for name in (*group.state, *group.directory))
    return len(group.state), names, tuple(tensors[name].shape for name in group.state)


def _conversion(
    module: Any, group: NameGroup, tensors: Mapping[str, torch.Tensor]
) -> Conversion | None:
    """Find how a group's tensors are slices of each other; None if they are not."""
    state = _numbered({name: tuple(tensors[name].shape) for name in group.state})
    try:
        converted = revert_weight_conversion(module, dict(state))
    except Exception:  # noqa: BLE001  (as above)
        return None
    if set(converted) != set(group.directory):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in (*state.items(), *converted.items())}
    inner = _slices(converted, state)
    if inner is not None:
        return Conversion(group, shapes, inner, inner_is_directory=True)
    directory = _numbered({name: shapes[name] for name in group.directory})
    inverse = _inverse(state, converted, directory)
    inner = None if inverse is None else _slices(inverse, directory)
    return None if inner is None else Conversion(group, shapes, inner, inner_is_directory=False)


def _numbered(shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Number the elements of all tensors, one tensor after the other."""
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    dtype = torch.int32 if sum(counts) <= INT32_MAX else torch.int64
    numbers = torch.split(torch.arange(sum(counts), dtype=dtype), counts)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, numbers, strict=True)}


def _inverse(
    state: Mapping[str, torch.Tensor],
    converted: Mapping[str, torch.Tensor],
    directory: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor] | None:
    """Number the elements of ``state`` with their positions in ``directory``."""
    total = sum(tensor.numel() for tensor in state.values())
    if total != sum(tensor.numel() for tensor in directory.values()):
        return None
    numbers = torch.empty(total, dtype=next(iter(state.values())).dtype)
    for name, tensor in converted.items():
        numbers[tensor.reshape(-1).long()] = directory[name].reshape(-1)
    parts = torch.split(numbers, [tensor.numel() for tensor in state.values()])
    return {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}


def _slices(
    inner: Mapping[str, torch.Tensor], outer: Mapping[str, torch.Tensor]
) -> dict[str, StridedTensorView] | None:
    """Find each numbered tensor as a slice of one of ``outer``; None if one is not a slice."""
    conversions = {name: _slice(tensor, outer) for name, tensor in inner.items()}
    return (
        {n: s for n, s in conversions.items() if s is not None}
        if all(conversions.values())
        else None
    )


def _slice(numbers: torch.Tensor, outer: Mapping[str, torch.Tensor]) -> StridedTensorView | None:
    if not numbers.numel():
        return None
    corner = numbers[(0,) * numbers.dim()]
    strides = tuple(
        int(numbers.select(dim, 1)[(0,) * (numbers.dim() - 1)] - corner) if size > 1 else 1
        for dim, size in enumerate(numbers.shape)
    )
    if min(strides, default=1) < 0:
        return None
    shape = tuple(numbers.shape)
    last_offset = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    for name, base in outer.items():
        offset = int(corner - base.view(-1)[0])
        if offset < 0 or offset + last_offset >= base.numel():
            continue
        target = StridedTensorView(name, shape, strides, offset)
        return target if torch.equal(target.of(base), numbers) else None
    return None
