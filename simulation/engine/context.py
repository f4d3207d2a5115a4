"""State shared by all parts of a simulation: the wire, the weights, the model, the records."""

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.ground_truth import GroundTruth
from tidegate.simulation.checks.model import TORN_WEIGHTS, HashModel, TurnModel
from tidegate.simulation.engine.wire import FrameLog, SimulatedRouter
from tidegate.transport.messages import TensorSpec, UpdateWeights

WHOLE_BYTES, PATCH_BYTES = 1000, 100
"""Sizes of a whole set and of a patch, in bytes. By them the run limits a chain of patches: here,
four patches may follow one another before it sends a whole set again."""


@dataclass(slots=True)
class WeightBuffer:
    """Buffer that the trainer writes weights to and engines copy from: a few slots."""

    contents: list[int] = field(default_factory=lambda: [0, 0])
    """Content of each slot, by the order of writing; ``TORN_WEIGHTS`` while the slot is written."""
    bases: dict[int, int] = field(default_factory=dict)
    """Slot -> content that its patches apply to; slots with whole sets are absent."""
    _written: int = 0
    """Content that is being written, or was written last."""
    _slot_of_version: dict[int, int] = field(default_factory=dict)
    """Version -> the slot that it was written to last."""
    _first_slot: int = 0
    """First slot of the present trainer process."""
    _last: tuple[int, int] | None = None
    """Version that was written last, and its content; None before the first, and while one is
    written. Patches are relative to it only, as those of ``WrittenElements``."""

    def begin(
        self,
        version: int,
        *,
        keep: Collection[int],
        content: int | None = None,
        patches_version: int | None = None,
    ) -> UpdateWeights:
        """Begin to write a version to a slot that holds none of the versions in ``keep``.

        ``content``: the weights to write; None for new weights. ``patches_version``: write patches
        of this version if it was written last. Return the update message, which has ``is_patch`` in
        that case.
        """
        kept_slots = {self._slot_of_version.get(version) for version in keep}
        first_slot = self._first_slot
        slot = next(slot for slot in itertools.count(first_slot) if slot not in kept_slots)
        self.contents.extend([TORN_WEIGHTS] * (slot + 1 - len(self.contents)))
        self._slot_of_version[version] = slot
        self._written = self._written + 1 if content is None else content
        self.contents[slot] = TORN_WEIGHTS
        last, self._last = self._last, None
        self.bases.pop(slot, None)
        nbytes = WHOLE_BYTES
        if last is not None and last[0] == patches_version:
            self.bases[slot], nbytes = last[1], PATCH_BYTES
        tensors = [TensorSpec("w", "bfloat16", [WHOLE_BYTES // 2], 0, nbytes)]
        return UpdateWeights(version=version, location=str(slot), tensors=tensors)

    def forget(self, *, is_new: bool = False) -> None:
        """Forget what was written last, as a new trainer process does: it has no set to patch.

        With ``is_new`` the process has a buffer of its own, and leaves the slots of earlier ones
        as they are.
        """
        self._last = None
        if is_new:
            self._first_slot = len(self.contents)
            self._slot_of_version.clear()

    def is_patch(self, update: UpdateWeights) -> bool:
        """Return whether the slot of ``update`` holds patches."""
        return int(update.location) in self.bases

    def end(self, update: UpdateWeights) -> None:
        """Finish writing the version of ``update``."""
        self.contents[int(update.location)] = self._written
        self._last = (update.version, self._written)


@dataclass(slots=True)
class SimulationContext:
    """State of one simulation that outlives its engine and orchestrator processes."""

    loop: asyncio.AbstractEventLoop
    frame_log: FrameLog
    ground_truth: GroundTruth = field(default_factory=GroundTruth)
    coverage: set[CoverageMark] = field(default_factory=set)
    """Coverage marks that the run has reached."""
    buffer: WeightBuffer = field(default_factory=WeightBuffer)
    model: TurnModel = field(default_factory=HashModel)
    router: SimulatedRouter = field(init=False)

    def __post_init__(self) -> None:
        self.router = SimulatedRouter(self.loop, self.frame_log, self.coverage)
