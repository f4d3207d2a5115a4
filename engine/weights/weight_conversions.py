"""Accepts published tensors under both naming schemes of a model, by transformers' conversion.

Used where a model is stored under one scheme, its ``state_dict()``'s (the transformers fallback) or
its directory's (external engines), and trainers publish under either. The conversion that
transformers applies on loading is not reimplemented: it is run on tensors of element indices, and
the result shows where each published tensor is stored.
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
from tidegate.transport.weight_names import NameGroup, name_groups

INT32_MAX = 2**31 - 1

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StridedTensorView:
    """A strided view of another, contiguous tensor."""

    whole: str
    shape: Shape
    strides: Shape
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of ``whole``."""
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


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
            names[n]: StridedTensorView(names[s.whole], s.shape, s.strides, s.offset)
            for n, s in self.inner.items()
        }
        shapes = {names[name]: shape for name, shape in self.shapes.items()}
        return Conversion(group, shapes, inner, self.inner_is_directory)


class _Pieces:
    """Copy target that splits a tensor: each slice goes to targets of its own."""

    def __init__(self, pieces: Sequence[tuple[StridedTensorView, Sequence[Any]]]) -> None:
        self._pieces = pieces

    def copy_(self, source: torch.Tensor, /) -> None:
        source = source.contiguous()
        for piece, targets in self._pieces:
            for target in targets:
                target.copy_(piece.of(source))

    def take_over(self, other: Any, /) -> None:
        raise AssertionError("parts are taken over by their own names")

    def unpacked(self) -> torch.Tensor:
        raise AssertionError("parts are read by their own names")

    def storages(self) -> list[torch.Tensor]:
        return []  # the parts have their own


def meta_model(path: Path) -> Any | None:
    """Make the transformers model of a directory on the meta device, without weights;
    None on failure."""
    configs: Any = transformers.AutoConfig
    models: Any = transformers.AutoModelForCausalLM
    try:
        config = configs.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return models.from_config(config, trust_remote_code=False)
    except Exception:  # noqa: BLE001  (then tensors are accepted by their own names only)
        return None


def find_conversions(module: Any, names: Sequence[str]) -> list[Conversion]:
    """Find how transformers converts the tensors ``names`` of a module that it made.

    Tries the conversions that loaded the directory, then all that it knows for the model. A group
    that is converted otherwise than by slicing, concatenating and transposing is left out: its
    tensors are accepted by their ``state_dict()`` names only.
    """
    meta = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    found: list[Conversion] = []
    known = set(meta)
    for uses_default in (False, True):
        cache: dict[object, Conversion | None] = {}
        with _conversions_of(module, uses_default=uses_default):
            for group in name_groups(names, lambda some: _reverted_names(module, meta, some)):
                if known.intersection(group.directory):
                    continue
                key = _pattern(group, meta)
                if key not in cache:
                    cache[key] = _conversion(module, group, meta)
                conversion = cache[key]
                if conversion is not None:
                    found.append(conversion.renamed(group))
                    known.update(group.directory)
    return found


def converted_targets(
    stored: Mapping[str, CopyTarget], conversions: Sequence[Conversion], *, stores_directory: bool
) -> tuple[dict[str, CopyTarget], dict[str, CopyTarget]]:
    """Return the places of the smallest tensors, and joint places of tensors that cover several.

    ``stored`` has the place of each tensor under one scheme: the directory's or the
    ``state_dict()``'s. Its targets are tensors.
    """
    places, joint = dict(stored), {}
    for conversion in conversions:
        group, inner = conversion.group, conversion.inner
        own, others = group.state, group.directory
        if stores_directory:
            own, others = others, own
        if any(name not in places for name in own) or any(n in joint for n in (*own, *others)):
            continue
        if not all(_is_contiguous(stored[name]) for name in own):
            continue
        if conversion.inner_is_directory == stores_directory:
            for whole in others:
                covers = tuple(name for name in own if inner[name].whole == whole)
                pieces = [(inner[name], stored[name].targets) for name in covers]
                joint[whole] = CopyTarget(conversion.shapes[whole], (_Pieces(pieces),), covers)
            continue
        for name in own:
            targets: Any = stored[name].targets
            parts = {n: inner[n] for n in others if inner[n].whole == name}
            views = {
                n: CopyTarget(part.shape, tuple(part.of(target) for target in targets))
                for n, part in parts.items()
            }
            if len(views) == 1:  # the same tensor by another name
                ((other, place),) = views.items()
                joint[other] = CopyTarget(place.shape, place.targets, covers=(name,))
            else:
                joint[name] = CopyTarget(stored[name].shape, targets, covers=tuple(views))
                places = _with_parts(places, name, views)
    return places, joint


def _is_contiguous(place: CopyTarget) -> bool:
    return all(isinstance(t, torch.Tensor) and t.is_contiguous() for t in place.targets)


def _with_parts(
    places: Mapping[str, CopyTarget], name: str, parts: Mapping[str, CopyTarget]
) -> dict[str, CopyTarget]:
    """Replace ``name`` by ``parts``, keeping the model's order."""
    made: dict[str, CopyTarget] = {}
    for other, place in places.items():
        made |= parts if other == name else {other: place}
    return made


@contextmanager
def _conversions_of(module: Any, *, uses_default: bool) -> Iterator[None]:
    """Make transformers convert as when it loaded the module, or by its defaults."""
    missing = object()
    kept = getattr(module, "_weight_conversions", missing)
    if uses_default and kept is not missing:
        module._weight_conversions = None
    try:
        yield
    finally:
        if kept is not missing:
            module._weight_conversions = kept


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
        made = revert_weight_conversion(module, dict(state))
    except Exception:  # noqa: BLE001  (as above)
        return None
    if set(made) != set(group.directory):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in (*state.items(), *made.items())}
    inner = _slices(made, state)
    if inner is not None:
        return Conversion(group, shapes, inner, inner_is_directory=True)
    directory = _numbered({name: shapes[name] for name in group.directory})
    inverse = _inverse(state, made, directory)
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
    made: Mapping[str, torch.Tensor],
    directory: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor] | None:
    """Number the elements of ``state`` by their positions in ``directory``."""
    total = sum(tensor.numel() for tensor in state.values())
    if total != sum(tensor.numel() for tensor in directory.values()):
        return None
    numbers = torch.empty(total, dtype=next(iter(state.values())).dtype)
    for name, tensor in made.items():
        numbers[tensor.reshape(-1).long()] = directory[name].reshape(-1)
    parts = torch.split(numbers, [tensor.numel() for tensor in state.values()])
    return {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}


def _slices(
    inner: Mapping[str, torch.Tensor], outer: Mapping[str, torch.Tensor]
) -> dict[str, StridedTensorView] | None:
    """Find each numbered tensor as a slice of one of ``outer``; None if one is not a slice."""
    found = {name: _slice(tensor, outer) for name, tensor in inner.items()}
    return {n: s for n, s in found.items() if s is not None} if all(found.values()) else None


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
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    for name, whole in outer.items():
        offset = int(corner - whole.view(-1)[0])
        if offset < 0 or offset + reach >= whole.numel():
            continue
        place = StridedTensorView(name, shape, strides, offset)
        return place if torch.equal(place.of(whole), numbers) else None
    return None
