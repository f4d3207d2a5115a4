"""Does this tensor belong to the model, and has every one come? The door for one version's weights.

It knows nothing of what is computed with them, nor of versions' numbers or how tensors travel.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tidegate.errors import WeightsRefused
from tidegate.kernels.int8_matrix import RoundedRows
from tidegate.kernels.weight_matrix import Rows, published, storages, take_over

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Others (float8, int8, …) mean nothing without their scales."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is taken of a published tensor: ``count`` rows of one of its dimensions."""

    dim: int
    first: int
    count: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of it."""
        return tensor.narrow(self.dim, self.first, self.count)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes: its published shape, and what to copy it into."""

    shape: tuple[int, ...]
    targets: tuple[Rows, ...]
    covers: tuple[str, ...] = ()
    """The names of its parts, if they may also come one by one; they are in then."""
    part: Part | None = None
    """What of the tensor goes there, if the rest is another rank's."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of a published tensor goes there."""
        return tensor if self.part is None else self.part.of(tensor)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy there what of a published tensor goes there."""
        part = self.cut(tensor)
        by_inputs = self.part is not None and self.part.dim == 1
        for target in self.targets:
            if by_inputs and isinstance(target, RoundedRows):
                target.copy_(part, tensor)  # whose other columns are in an output's step, too
            else:
                target.copy_(part)


class WeightStore:
    """All tensors of one version. Fill it with :meth:`load`, on any one thread at a time.

    A thread may load into one object while another computes with a different one: copies run
    outside the interpreter's lock.
    """

    def __init__(
        self, model: str, places: Mapping[str, Place], *, joint: Mapping[str, Place] | None = None
    ) -> None:
        self._model = model
        """What refusals call it."""
        self._places = places
        self._joint_places = joint or {}
        """Other names, each for several of ``_places``."""
        self._loaded: set[str] = set()
        self.adapters: Mapping[str, object] = {}
        """Those of the version, by name; replaced, never changed."""
        self._ignored: set[str] = set()
        """Redundant names that came."""
        self._early_copies: dict[str, tuple[str, torch.Tensor]] = {}
        """Copies of tensors that came before the tensor they are tied to, by the latter's name,
        each with its own name; they are compared once the latter is loaded."""

    def is_redundant(self, name: str) -> bool:
        """Whether a tensor by this name says nothing new, so that it may be left out or ignored."""
        return False

    def tied_to(self, name: str) -> str | None:
        """Which tensor a redundant one is, or None if it is none at all."""
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it is kept in, some of it more than once."""
        for place in self._places.values():
            for target in place.targets:
                yield from storages(target)

    def start(self) -> None:
        """Begin a new version in the same memory: nothing counts as loaded any more."""
        self._loaded.clear()
        self._ignored.clear()
        self._early_copies.clear()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor that Hugging Face calls ``name`` into its place, casting it.

        Raises:
            WeightsRefused: the model has no such tensor, or it has another shape or kind, or holds
                what is no number, or differs from the tensor that it is tied to.
        """
        place = self._places.get(name) or self._joint_places.get(name)
        if place is None:
            if self.is_redundant(name):
                self._ignored.add(name)
                self._compare_tied(name, tensor)
                return
            raise WeightsRefused(
                f"{self._model} has no tensor {name!r}; publish the model that config.json "
                f"describes, by its names there"
            )
        if tuple(tensor.shape) != place.shape:
            raise WeightsRefused(
                f"{name} has shape {list(tensor.shape)}, expected {list(place.shape)}"
            )
        if tensor.dtype not in LOADABLE_DTYPES:
            raise WeightsRefused(
                f"{name} is {tensor.dtype}; publish float32, bfloat16, float16 or float64"
            )
        with torch.no_grad():
            if not _is_finite(place.cut(tensor)):
                raise WeightsRefused(
                    f"{name} holds what is no number (NaN, or infinite): the train step before "
                    f"this publish went wrong. Take it back, and publish the weights of before"
                )
            place.fill(tensor)
        for loaded in place.covers or (name,):
            self._loaded.add(loaded)
            if (early := self._early_copies.pop(loaded, None)) is not None:
                self._refuse_unless_same(*early, loaded)

    def _compare_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor with the one it is tied to, now or when that one comes."""
        tied = self.tied_to(name)
        place = None if tied is None else self._places.get(tied)
        if tied is None or place is None:
            return
        if tuple(tensor.shape) != place.shape:
            raise WeightsRefused(
                f"{name} has shape {list(tensor.shape)}, expected {list(place.shape)}"
            )
        part = place.cut(tensor)
        if tied in self._loaded:
            self._refuse_unless_same(name, part, tied)
        else:
            self._early_copies[tied] = name, part.clone()

    def _refuse_unless_same(self, name: str, part: torch.Tensor, tied: str) -> None:
        """Refuse a tensor that the model doesn't hold because it computes with ``tied`` instead.

        The last target is compared: it is the most precise one, an LM head's.
        """
        there = published(self._places[tied].targets[-1])
        if not torch.equal(part.to(there.device, there.dtype), there):
            raise WeightsRefused(
                f"{name} differs from {tied}, and {self._model} computes with {tied} in its place "
                f"(tie_word_embeddings). Publish them equal, or serve a model directory that has "
                f"both tensors and tie_word_embeddings=false in its config.json"
            )

    @property
    def is_untouched(self) -> bool:
        """Whether no tensor has come since :meth:`start`."""
        return not self._loaded and not self._ignored

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> object:
        """An adapter for this model, of tensors as the protocol names them.

        Raises:
            WeightsRefused: it doesn't fit, or no adapter can be served.
        """
        raise WeightsRefused(
            f"transformers computes {self._model} here, without adapters; merge them into the "
            f"weights, and publish those"
        )

    def complete_from(self, other: "WeightStore") -> None:
        """Copy what has not come from a whole set of the same model.

        Raises:
            WeightsRefused: of two tensors that are one, the one came that nobody takes it from.
        """
        for name in sorted(self._ignored):
            tied = self.tied_to(name)
            if tied is not None and tied not in self._loaded:
                raise WeightsRefused(
                    f"{name} is tied to {tied}, which isn't published with it; publish that one"
                )
        with torch.no_grad():
            for name in self.missing():
                sources = other._places[name].targets
                for target, source in zip(self._places[name].targets, sources, strict=True):
                    take_over(target, source)
                self._loaded.add(name)

    def missing(self) -> list[str]:
        """The names not loaded since :meth:`start`, in the model's order."""
        return [name for name in self._places if name not in self._loaded]


def _is_finite(tensor: torch.Tensor) -> bool:
    """A sum is NaN or infinite if one of its terms is, and is had as fast as memory is read. As one
    of large numbers may overflow, one that is not finite has each term looked at."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())
