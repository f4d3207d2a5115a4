"""The content of a weight version: where its tensors lie, and what brings it to an engine.

:mod:`tidegate.orchestrator.core.weight_control` keeps one for each version.

A version is a whole set of tensors, published at some time or the model directory's, under what was
published since of single ones. An engine that serves any version since that set needs no more than
the latter. Whoever serves another gets both. Adapters are small: each engine gets all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from tidegate.transport.messages import Adapter, Bases, UpdateWeights

LAYERS_MAX = 8
"""Of changed tensors over a whole set; then one is sent whole again. What was written for a layer
is kept until all its tensors have come anew: where others change each time, as a mixture's experts
do, that could be any number of sets."""

UNKNOWN = 0
"""A version that was never written: all tensors are others than its."""


@dataclass(frozen=True, slots=True)
class WeightContent:
    """One version's tensors. Each part's ``version`` is the one that it was written as."""

    whole: tuple[UpdateWeights, ...] | None = None
    """The newest whole set, or None: the model directory's, which every engine starts with."""
    over: tuple[UpdateWeights, ...] = ()
    """Tensors published since then, to be taken in this order; of each the newest."""
    bases: Bases | None = None
    """Versions that ``over`` alone leads on from: those released since the whole set, if any."""

    adapters: Mapping[str, tuple[UpdateWeights, ...]] = field(default_factory=dict)
    """All tensors of each LoRA adapter that the version has."""

    @property
    def buffers(self) -> set[int]:
        """The versions as which its parts were written: those that the channel must keep."""
        return {part.version for part in (*(self.whole or ()), *self.over, *self._of_adapters)}

    @property
    def _of_adapters(self) -> Iterator[UpdateWeights]:
        return (part for parts in self.adapters.values() for part in parts)

    def messages(self, version: int, *, live: int | None) -> list[UpdateWeights]:
        """How an engine that serves ``live`` gets this as ``version``."""
        bases = self.bases
        follows = bases is not None and live is not None and bases.first <= live <= bases.last
        if self.whole is not None and not follows:
            parts, bases = [*self.whole, *self.over], None
        else:
            parts = [*self.over]
        parts += self._of_adapters
        parts = parts or [UpdateWeights(version=version, location="", tensors=[])]
        return [
            msgspec.structs.replace(part, version=version, bases=bases, last=part is parts[-1])
            for part in parts
        ]

    def served_as(self, version: int) -> "WeightContent":
        """The same, now that engines may serve it as ``version``."""
        return replace(self, bases=Bases(self.bases.first if self.bases else version, version))


MODEL_DIRECTORY = WeightContent(bases=Bases(0, 0))
"""Version 0."""

Change = Callable[[WeightContent, Sequence[UpdateWeights]], WeightContent]
"""What a publish makes of the version before and of the tensors that were written for it."""


def anew(before: WeightContent, parts: Sequence[UpdateWeights]) -> WeightContent:
    """A whole set of the model's own tensors."""
    return WeightContent(tuple(parts), (), None, before.adapters)


def laid_over(before: WeightContent, parts: Sequence[UpdateWeights]) -> WeightContent:
    """Some tensors; the rest is that of the version before."""
    names = {spec.name for part in parts for spec in part.tensors}
    left = (_without(part, names) for part in before.over)
    return replace(before, over=(*(part for part in left if part.tensors), *parts))


def with_adapter(
    adapter: Adapter, before: WeightContent, parts: Sequence[UpdateWeights]
) -> WeightContent:
    """Another adapter, or new tensors for one."""
    named = tuple(msgspec.structs.replace(part, adapter=adapter) for part in parts)
    return replace(before, adapters={**before.adapters, adapter.name: named})


def without_adapter(
    name: str, before: WeightContent, parts: Sequence[UpdateWeights]
) -> WeightContent:
    """An adapter fewer."""
    left = {other: parts for other, parts in before.adapters.items() if other != name}
    return replace(before, adapters=left)


def _without(part: UpdateWeights, names: set[str]) -> UpdateWeights:
    tensors = [spec for spec in part.tensors if spec.name not in names]
    return msgspec.structs.replace(part, tensors=tensors)
