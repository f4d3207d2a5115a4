"""Content of a weight version: where its tensors lie, and which messages bring it to an engine.

:class:`WeightControl` keeps one :class:`WeightContent` per version. The publish path
(``trainer/weight_updates.py``) chooses the :data:`Change` that turns the previous version's content
into the new version's.

A version consists of a whole set of tensors (published, or the model directory's), patches of its
elements, and the tensors that partial publishes have replaced since. An engine that already serves
a version based on the whole set gets only what it lacks; any other engine gets everything, the
whole set first. Adapters are small: each engine gets all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tidegate.transport.messages import Adapter, BaseVersions, UpdateWeights
from tidegate.transport.weight_names import DRAFT_PREFIX

LAYERS_MAX = 8
"""Number of buffers over a whole set at which a publish with ``weight_deltas`` sends all tensors
again. The buffer of a delta is kept until all its tensors were replaced; if each publish changes
other tensors, as with the experts of a mixture-of-experts model, buffers would accumulate without
limit. The trainer's own partial publishes count but are not limited."""

PATCHES_MAX = 16
"""Number of patches in a row after which a publish with ``weight_deltas="elements"`` sends a whole
set again. A late engine applies all of them to the whole set that they follow."""

UNKNOWN = 0
"""Stands for a version that was never written, so that every tensor counts as changed since."""


@dataclass(frozen=True, slots=True)
class PatchStep:
    """Patches that make one version from another, exactly."""

    base_version: int
    """Version that the patches apply to."""
    parts: tuple[UpdateWeights, ...]


@dataclass(frozen=True, slots=True)
class WeightContent:
    """Tensors of one version, as update messages (parts).

    A part's ``version`` is the version under which its tensors were written to a buffer.
    """

    whole: tuple[UpdateWeights, ...] | None = None
    """Newest whole set, or None for the model directory's, which every engine starts with."""
    patches: tuple[PatchStep, ...] = ()
    """Patches of elements since ``whole``, each over the one before. They end where tensors are
    published by other means."""
    overlays: tuple[UpdateWeights, ...] = ()
    """Tensors published since ``whole``; of each tensor only the newest."""
    bases: BaseVersions | None = None
    """Versions that become this one by applying ``overlays`` alone: the versions that engines may
    have served since the whole set was published."""

    adapters: Mapping[str, tuple[UpdateWeights, ...]] = field(default_factory=dict)
    """All tensors of each LoRA adapter of the version, by name."""

    @property
    def buffers(self) -> set[int]:
        """Versions under which the parts were written: the buffers that the channel must keep."""
        tensors = (*(self.whole or ()), *self._patches_after(0), *self.overlays)
        return {part.version for part in (*tensors, *self._of_adapters)}

    @property
    def whole_version(self) -> int:
        """Newest version that all tensors of the base were published for, whole or as patches."""
        return max((p.version for p in (*(self.whole or ()), *self._patches_after(0))), default=0)

    @property
    def draft(self) -> tuple[UpdateWeights, ...]:
        """Tensors and patches of the draft model, in order."""
        tensors = (*(self.whole or ()), *self._patches_after(0), *self.overlays)
        return tuple(_of_draft(tensors))

    @property
    def has_room_for_patches(self) -> bool:
        """Whether another patch may follow: there are few, of less than half of the whole set."""
        patch_bytes = sum(spec.nbytes for p in self._patches_after(0) for spec in p.tensors)
        whole_bytes = sum(spec.nbytes for part in self.whole or () for spec in part.tensors)
        return len(self.patches) < PATCHES_MAX and 2 * patch_bytes < whole_bytes

    def _patches_after(self, step: int) -> tuple[UpdateWeights, ...]:
        return tuple(part for each in self.patches[step:] for part in each.parts)

    def _step_from(self, live: int | None) -> int | None:
        """Return the first step of the patches that an engine of version ``live`` lacks."""
        bases = [step.base_version for step in self.patches]
        return bases.index(live) if live in bases else None

    @property
    def _of_adapters(self) -> Iterator[UpdateWeights]:
        return (part for parts in self.adapters.values() for part in parts)

    def messages(
        self, version: int, *, live: int | None, is_swapping: bool = False
    ) -> list[UpdateWeights]:
        """Return the messages that bring an engine from version ``live`` to this one, ``version``.

        ``is_swapping``: the engine was sent ``finish`` of a later version and has not confirmed it,
        so it may serve either version when it reads these messages. Patches apply to only one of
        the two versions, so the engine gets the whole set.
        """
        bases = self.bases
        follows = bases is not None and live is not None and bases.first <= live <= bases.last
        step = None if follows or is_swapping else self._step_from(live)
        if step is not None and live is not None:
            parts = [*self._patches_after(step), *self.overlays]
            bases = BaseVersions(live, live)
        elif self.whole is not None and not follows:
            parts, bases = [*self.whole, *self._patches_after(0), *self.overlays], None
        else:
            parts = [*self.overlays]
        parts += self._of_adapters
        parts = parts or [UpdateWeights(version=version, location="", tensors=[])]
        return [
            msgspec.structs.replace(
                part, version=version, base_versions=bases, is_last=part is parts[-1]
            )
            for part in parts
        ]

    def served_as(self, version: int) -> "WeightContent":
        """Return the same content with ``version``, which engines may now serve, in ``bases``."""
        return replace(
            self, bases=BaseVersions(self.bases.first if self.bases else version, version)
        )


MODEL_DIRECTORY = WeightContent(bases=BaseVersions(0, 0))
"""Content of version 0: the tensors of the model directory, and no update message."""

Change = Callable[[WeightContent, Sequence[UpdateWeights]], WeightContent]
"""Makes a version's content from the version before and the tensors written for it."""


def replace_all(before: WeightContent, parts: Sequence[UpdateWeights]) -> WeightContent:
    """Replace all of the model's own tensors; keep the draft model's, if none are among them."""
    has_draft = any(_of_draft(parts))
    kept = () if has_draft else before.draft
    return WeightContent(tuple(parts), overlays=kept, adapters=before.adapters)


def patch_elements(
    base_version: int, before: WeightContent, parts: Sequence[UpdateWeights]
) -> WeightContent:
    """Change elements of the model's own tensors, as they are in ``base_version``."""
    step = PatchStep(base_version, tuple(parts))
    return replace(before, patches=(*before.patches, step), bases=None)


def replace_some(before: WeightContent, parts: Sequence[UpdateWeights]) -> WeightContent:
    """Replace some tensors; keep the others of the version before."""
    names = {spec.name for part in parts for spec in part.tensors}
    left = (_without(part, names) for part in before.overlays)
    return replace(before, overlays=(*(part for part in left if part.tensors), *parts))


def with_adapter(
    adapter: Adapter, before: WeightContent, parts: Sequence[UpdateWeights]
) -> WeightContent:
    """Add an adapter, or replace its tensors."""
    named = tuple(msgspec.structs.replace(part, adapter=adapter) for part in parts)
    return replace(before, adapters={**before.adapters, adapter.name: named})


def without_adapter(
    name: str, before: WeightContent, parts: Sequence[UpdateWeights]
) -> WeightContent:
    """Remove an adapter."""
    left = {other: parts for other, parts in before.adapters.items() if other != name}
    return replace(before, adapters=left)


def _of_draft(parts: Sequence[UpdateWeights]) -> Iterator[UpdateWeights]:
    """Yield the parts with the draft model's tensors alone."""
    for part in parts:
        tensors = [spec for spec in part.tensors if spec.name.startswith(DRAFT_PREFIX)]
        if tensors:
            yield msgspec.structs.replace(part, tensors=tensors)


def _without(part: UpdateWeights, names: set[str]) -> UpdateWeights:
    tensors = [spec for spec in part.tensors if spec.name not in names]
    return msgspec.structs.replace(part, tensors=tensors)
