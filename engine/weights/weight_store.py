"""Base class of one weight version: validates and copies each published tensor.

Each implementation of models has a subclass. Staging and the loaders fill it; it tracks which
tensors are missing. A refused tensor raises ``WeightsRefused``.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tidegate.errors import WeightsRefused
from tidegate.kernels.rounded_matrix import RoundedRows
from tidegate.kernels.weight_matrix import Rows, add_bits, published, storages, take_over
from tidegate.transport.weight_channels.patches import Bits, ElementPatch
from tidegate.transport.weight_names import DRAFT_PREFIX, wrapper_hint

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Accepted dtypes; quantised ones (float8, int8) are meaningless without their scales."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One rank's slice of a published tensor: ``count`` rows of dimension ``dim``."""

    dim: int
    first: int
    count: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice as a view."""
        return tensor.narrow(self.dim, self.first, self.count)

    def elements(
        self, index: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of some elements are in the slice, by their indices there.

        Args:
            index: [C], row-major indices in the whole tensor, ascending.
            values: [C], one for each element.
            shape: the whole tensor's.
        """
        inner = math.prod(shape[self.dim + 1 :])
        along = index // inner % shape[self.dim] - self.first
        outer = index // (inner * shape[self.dim])
        is_in = (along >= 0) & (along < self.count)
        local = (outer * self.count + along) * inner + index % inner
        return local[is_in], values[is_in].contiguous()


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where a published tensor is stored: its shape, and the targets of the copy."""

    shape: tuple[int, ...]
    targets: tuple[Rows, ...]
    covers: tuple[str, ...] = ()
    """Names of the parts that may also be published one by one; loading this
    tensor loads them all."""
    part: TensorSlice | None = None
    """Slice to store, if other ranks hold the rest."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a published tensor that this target stores."""
        return tensor if self.part is None else self.part.of(tensor)

    @property
    def copies(self) -> list[Rows]:
        """Targets of the copy, flat. A target that holds the slice several times, such as a norm
        stored once per head, is listed that often."""
        shape = list(self.shape)
        if self.part is not None:
            shape[self.part.dim] = self.part.count
        elements = math.prod(shape)
        copies: list[Rows] = []
        for target in self.targets:
            if isinstance(target, torch.Tensor) and target.numel() > elements > 0:
                copies += target.view(-1, *shape).unbind(0)
            else:
                copies.append(target)
        return copies

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a published tensor's slice to the targets."""
        part = self.cut(tensor)
        by_inputs = self.part is not None and self.part.dim == 1
        for target in self.targets:
            if by_inputs and isinstance(target, RoundedRows):
                target.copy_(part, tensor)  # the scale of an output depends on all its columns
            else:
                target.copy_(part)


class WeightStore:
    """All tensors of one version. Fill it with :meth:`load`, on one thread at a time.

    A thread may load one object while another computes with a different one: copies release the
    GIL.
    """

    def __init__(
        self,
        model: str,
        targets: Mapping[str, CopyTarget],
        *,
        joint: Mapping[str, CopyTarget] | None = None,
    ) -> None:
        self._model = model
        """Description of the model for error messages."""
        self._copy_targets = targets
        self._joint_targets = joint or {}
        """Copy targets of tensors that each cover several of ``_copy_targets``."""
        self._loaded: set[str] = set()
        self.adapters: Mapping[str, object] = {}
        """Adapters of the version by name; replaced as a whole, never changed."""
        self._ignored: set[str] = set()
        """Redundant tensors that were published."""
        self._patches: dict[str, list[ElementPatch]] = {}
        """Patches of this update by tensor, in order."""
        self._redundant_patches: dict[str, list[ElementPatch]] = {}
        """Patches of this update to tensors that are tied to others, by their own names."""
        self._early_copies: dict[str, tuple[str, torch.Tensor]] = {}
        """Tensors that arrived before the tensor that they are tied to, kept for a comparison with
        it: name and copy, by the name of the other tensor."""
        self.draft: WeightStore | None = None
        """Weights of the draft model, which are published and swapped with these; None if there is
        none."""
        self.draft_version = 0
        """Version whose publish changed ``draft`` last; 0 if they are the directory's."""
        self._reload_draft: Callable[[], None] = lambda: None

    def attach_draft(self, draft: "WeightStore", reload: Callable[[], None]) -> None:
        """Take the draft model's tensors too, each under its name after ``DRAFT_PREFIX``.

        ``reload`` fills ``draft`` from its directory.
        """
        self.draft, self._reload_draft = draft, reload
        self._copy_targets = {**self._copy_targets, **_prefixed(draft._copy_targets)}
        self._joint_targets = {**self._joint_targets, **_prefixed(draft._joint_targets)}

    def keep_draft(self, live: "WeightStore | None") -> None:
        """Complete a whole set that came without a draft: copy the live one, or reload it from its
        directory if ``live`` is None, because the live weights are not in memory."""
        if self.draft is None or self._has_draft:
            return
        if live is None:
            self._reload_draft()
        else:
            self.copy_missing(live)

    @property
    def _has_draft(self) -> bool:
        return any(name.startswith(DRAFT_PREFIX) for name in self._loaded)

    def _is_redundant(self, name: str) -> bool:
        """Whether to ignore the tensor: redundant ones, and a draft's where there is none."""
        if not name.startswith(DRAFT_PREFIX):
            return self.is_redundant(name)
        return self.draft is None or self.draft.is_redundant(name.removeprefix(DRAFT_PREFIX))

    def _tied_to(self, name: str) -> str | None:
        if not name.startswith(DRAFT_PREFIX):
            return self.tied_to(name)
        tied = self.draft and self.draft.tied_to(name.removeprefix(DRAFT_PREFIX))
        return f"{DRAFT_PREFIX}{tied}" if tied else None

    def _model_of(self, name: str) -> str:
        if self.draft is None or not name.startswith(DRAFT_PREFIX):
            return self._model
        return f"the draft model, {self.draft._model},"

    def is_redundant(self, name: str) -> bool:
        """Whether the tensor carries no information, so that it may be omitted or ignored."""
        return False

    def tied_to(self, name: str) -> str | None:
        """Return the tensor that a redundant one is tied to; None if it is not tied."""
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all storage tensors; some more than once."""
        for copy_target in self._copy_targets.values():
            for target in copy_target.targets:
                yield from storages(target)

    def start(self) -> None:
        """Begin a new version in the same memory: no tensor counts as loaded."""
        self._loaded.clear()
        self._ignored.clear()
        self._early_copies.clear()
        self._patches.clear()
        self._redundant_patches.clear()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor that Hugging Face calls ``name`` to its targets, casting it.

        Raises:
            WeightsRefused: the model has no such tensor; or the tensor's shape or dtype is wrong,
                or it is not finite, or it differs from the tensor that it is tied to.
        """
        target = self._copy_targets.get(name) or self._joint_targets.get(name)
        if target is None:
            if self._is_redundant(name):
                self._ignored.add(name)
                self._compare_tied(name, tensor)
                return
            raise WeightsRefused(
                f"{self._model_of(name)} has no tensor {name!r}; publish the model that "
                f"config.json describes, by its names there{wrapper_hint(name)}"
            )
        if tuple(tensor.shape) != target.shape:
            raise WeightsRefused(
                f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
            )
        if tensor.dtype not in LOADABLE_DTYPES:
            raise WeightsRefused(
                f"{name} is {tensor.dtype}; publish float32, bfloat16, float16 or float64"
            )
        with torch.no_grad():
            if not _is_finite(target.cut(tensor)):
                raise WeightsRefused(
                    f"{name} contains NaN or infinity: the training step before "
                    f"this publish diverged. Undo it, and publish the previous weights"
                )
            target.fill(tensor)
        for loaded in target.covers or (name,):
            self._loaded.add(loaded)
            if (early := self._early_copies.pop(loaded, None)) is not None:
                self._refuse_unless_same(*early, loaded)

    def _compare_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor with the tensor that it is tied to, now or once the latter is loaded."""
        tied = self._tied_to(name)
        target = None if tied is None else self._copy_targets.get(tied)
        if tied is None or target is None:
            return
        if tuple(tensor.shape) != target.shape:
            raise WeightsRefused(
                f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
            )
        part = target.cut(tensor)
        if tied in self._loaded:
            self._refuse_unless_same(name, part, tied)
        else:
            self._early_copies[tied] = name, part.clone()

    def _refuse_unless_same(self, name: str, part: torch.Tensor, tied: str) -> None:
        """Refuse a tensor that differs from ``tied``, which the model uses in its place.

        Compared with the last target, the most precise one: an LM head's.
        """
        stored = published(self._copy_targets[tied].targets[-1])
        if not torch.equal(part.to(stored.device, stored.dtype), stored):
            raise self._differ(name, tied)

    def _differ(self, name: str, tied: str) -> WeightsRefused:
        return WeightsRefused(
            f"{name} differs from {tied}, and {self._model_of(name)} computes with {tied} in its "
            f"place (tie_word_embeddings). Publish them equal, or serve a model directory that has "
            f"both tensors and tie_word_embeddings=false in its config.json"
        )

    @property
    def is_untouched(self) -> bool:
        """Whether no tensor has been published since :meth:`start`."""
        return not self._loaded and not self._ignored

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> object:
        """Make a LoRA adapter for this model from tensors named as in the protocol.

        Raises:
            WeightsRefused: it does not fit, or adapters are not supported.
        """
        raise WeightsRefused(
            f"transformers computes {self._model} here, without adapters; merge them into the "
            f"weights, and publish those"
        )

    def patch(self, name: str, dtype: torch.dtype, patch: ElementPatch) -> None:
        """Change elements of a loaded tensor, as if the whole changed tensor had been loaded.

        Args:
            name: the tensor's name, as for :meth:`load`.
            dtype: dtype in which the tensor is published.
            patch: the changed elements.

        Raises:
            WeightsRefused: the model has no such tensor, stores it rounded, or gets elements that
                are not finite.
        """
        target = self._copy_targets.get(name) or self._joint_targets.get(name)
        if target is None:
            if self._is_redundant(name):
                self._redundant_patches.setdefault(name, []).append(patch)
                return
            raise WeightsRefused(
                f"{self._model_of(name)} has no tensor {name!r} to patch; publish a whole state "
                "dict by the names that the model directory has"
            )
        self._patches.setdefault(name, []).append(patch)
        index, difference = torch.from_numpy(patch.index), _as_signed(patch.difference)
        if target.part is not None:
            index, difference = target.part.elements(index, difference, target.shape)
        try:
            is_finite = [add_bits(each, index, difference, dtype) for each in target.copies]
        except ValueError as error:
            raise WeightsRefused(
                f"{name} can't be patched, because {error}; set weight_deltas to True or False, "
                f"which send whole tensors"
            ) from None
        if not all(is_finite):
            raise WeightsRefused(
                f"{name} contains NaN or infinity: the training step before this publish "
                f"diverged. Undo it, and publish the previous weights"
            )

    def end_patches(self) -> None:
        """Compare the patches of tied tensors, once all of an update have been applied.

        Raises:
            WeightsRefused: a tensor differs from the tensor that it is tied to.
        """
        for name, patches in self._redundant_patches.items():
            tied = self._tied_to(name)
            if tied is not None and not _are_equal(patches, self._patches.get(tied, [])):
                raise self._differ(name, tied)

    def verify(self, name: str, dtype: torch.dtype, crc32: int) -> None:
        """Compare a patched tensor with its checksum; does nothing for a slice of a tensor.

        Raises:
            WeightsRefused: the bytes differ.
        """
        target = self._copy_targets.get(name) or self._joint_targets.get(name)
        if target is None or target.part is not None or not target.targets:
            return
        elements = published(target.copies[-1]).to("cpu", dtype).contiguous()
        actual = zlib.crc32(elements.view(-1).view(torch.uint8).numpy().data)
        if actual != crc32:
            raise WeightsRefused(
                f"{name} has the checksum {actual:#010x} after its patch, and {crc32:#010x} was "
                f"sent: this engine patched other weights. Publish a whole state dict"
            )

    def become(self, other: "WeightStore") -> None:
        """Copy all of another complete version of the same model, in its stored layout."""
        copied: set[int] = set()
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            if mine.data_ptr() not in copied:
                copied.add(mine.data_ptr())
                mine.copy_(theirs)
        self.mark_complete()

    def mark_complete(self) -> None:
        """Count all tensors as loaded: they hold a complete version."""
        self._loaded.update(self._copy_targets)

    def complete_from(self, other: "WeightStore") -> None:
        """Copy the tensors that have not been loaded from a complete version of the same model.

        Raises:
            WeightsRefused: a tied tensor was published without the tensor that it is tied to.
        """
        for name in sorted(self._ignored):
            tied = self._tied_to(name)
            if tied is not None and tied not in self._loaded:
                raise WeightsRefused(
                    f"{name} is tied to {tied}, which isn't published with it; publish {tied} too"
                )
        self.copy_missing(other)

    def copy_missing(self, other: "WeightStore") -> None:
        """Copy the tensors that have not been loaded from a complete version of the same model."""
        with torch.no_grad():
            for name in self._not_loaded():
                sources = other._copy_targets[name].targets
                for target, source in zip(self._copy_targets[name].targets, sources, strict=True):
                    take_over(target, source)
                self._loaded.add(name)

    def missing(self) -> list[str]:
        """Return the names that a whole set still lacks since :meth:`start`, in the model's order.
        A draft may be left out as a whole."""
        has_draft = self._has_draft
        names = self._not_loaded()
        return [name for name in names if has_draft or not name.startswith(DRAFT_PREFIX)]

    def _not_loaded(self) -> list[str]:
        return [name for name in self._copy_targets if name not in self._loaded]


def _prefixed(targets: Mapping[str, CopyTarget]) -> dict[str, CopyTarget]:
    """Return the copy targets of a draft model by the names in a publish."""
    return {
        DRAFT_PREFIX + name: replace(
            target, covers=tuple(DRAFT_PREFIX + covered for covered in target.covers)
        )
        for name, target in targets.items()
    }


def _are_equal(one: Sequence[ElementPatch], other: Sequence[ElementPatch]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.index, b.index) and np.array_equal(a.difference, b.difference)
        for a, b in zip(one, other, strict=True)
    )


def _as_signed(difference: Bits) -> torch.Tensor:
    """Return the differences as signed integers of the same size, because torch has no unsigned
    ones. Sums wrap around in the same way."""
    return torch.from_numpy(difference.view(f"i{difference.itemsize}"))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Check all values through their sum, which is as fast as reading memory. The sum of large
    numbers may overflow, so if it is not finite each value is checked."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())
