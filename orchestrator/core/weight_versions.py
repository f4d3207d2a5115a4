"""Versions of the run's weights: the weight channel's buffer, contents, rollbacks.

An engine gets ``init`` once. For each version it gets ``start`` and ``update``, and copies the
tensors beside its live weights while it decodes; after ``finish`` it swaps between two steps. The
version released last stays in the channel's buffer until the next release, for engines that join
late or whose update failed. A partial publish replaces tensors of the newest published version that
has not failed.
"""

from collections.abc import Collection

from typing_extensions import override

from tidegate.errors import PublishDropped, TidegateError, WeightsRefused
from tidegate.orchestrator.core.control_events import (
    PublishRequested,
    Reserved,
    ReserveRequested,
    RetractVersions,
)
from tidegate.orchestrator.core.control_state import ControlState, NextVersion, Steps, Wait
from tidegate.orchestrator.core.pause_control import PauseControl
from tidegate.orchestrator.core.target_versions import Publish, TargetVersions, WeightUpdate
from tidegate.orchestrator.core.weight_content import (
    LAYERS_MAX,
    MODEL_DIRECTORY,
    UNKNOWN,
    WeightContent,
)
from tidegate.transport.message import KvPolicy, SwapMode
from tidegate.transport.messages import FinishWeightUpdate, Message

UNKNOWN_BASE = (
    "this run continues with another process's weights, and does not have the weights that a part "
    "of a set or an adapter would be laid over; publish a whole state dict first, or the model "
    "directory's if only adapters are trained"
)


class WeightVersions(TargetVersions):
    """Versions of the run's weights."""

    def __init__(
        self,
        state: ControlState,
        pauses: PauseControl,
        swap_mode: SwapMode,
        *,
        wave_engines: int | None,
        timeout_s: float,
        next_version: NextVersion,
    ) -> None:
        """The arguments are those of :class:`WeightControl`."""
        super().__init__(state, timeout_s=timeout_s, wave_engines=wave_engines)
        self._pauses = pauses
        self._next_version = next_version
        self._is_retracted = False
        self._swap_mode = swap_mode
        self._base: WeightUpdate | None = None
        """Version whose tensors a partial publish replaces; None for the model directory's."""

    # ------------------------------------------------------------ queries

    @property
    def kept_buffers(self) -> frozenset[int]:
        """Buffers of the weight channel that hold the version released last, named by the versions
        that were written to them."""
        kept = self.kept
        return frozenset() if kept is None else frozenset({kept.version} | kept.content.buffers)

    @property
    def has_whole_set(self) -> bool:
        """Whether engines without weights can get a whole set of them."""
        return self.kept is None or self.kept.content.whole is not None

    @property
    def base_version(self) -> int:
        """Version whose tensors a partial publish would replace now; 0 for the model
        directory's."""
        return self._base.version if self._base is not None else 0

    @property
    def base_adapters(self) -> Collection[str]:
        """Names of the adapters of :attr:`base_version`."""
        return self._base.content.adapters if self._base is not None else ()

    @property
    def is_writable(self) -> bool:
        """Whether no engine reads a buffer that may be overwritten. Readers of the kept version
        are not waited for, because the next version replaces theirs."""
        update = self.update
        return update is None or update is self.kept or not update.staging

    def choose_kv_policy(self, kv_policy: KvPolicy) -> None:
        """Have later swaps do this to the KV of kept turns."""
        self._swap_mode = self._swap_mode._replace(kv_policy=kv_policy)

    # ------------------------------------------------------------ what the target says

    @property
    @override
    def _engines(self) -> Collection[str]:
        return self._state.engines

    @override
    def _lacks(self, engine: str, update: WeightUpdate) -> bool:
        return self._state.engines[engine].served_version != update.version

    @override
    def _stage_messages(self, engine: str, update: WeightUpdate) -> list[Message]:
        served = self._state.engines[engine]
        chunks = update.content.messages(
            update.version, live=served.base_version, is_swapping=served.is_swapping
        )
        return [served.start_message(update.version), *chunks]

    @override
    def _swap_message(self, engine: str, update: WeightUpdate) -> Message:
        self._state.engines[engine].newest_finish = update.version
        return FinishWeightUpdate(version=update.version, **self._swap_mode._asdict())

    @override
    def _content_of(self, event: PublishRequested) -> WeightContent:
        before = self._base
        content = MODEL_DIRECTORY if before is None else before.content
        if before is not None and before.is_released:
            content = content.served_as(before.version)
        return event.change(content, event.chunks)

    @property
    @override
    def _swaps_available(self) -> int:
        return 0 if self._pauses.is_under_way else super()._swaps_available

    # ------------------------------------------------------------ publishing

    def reserve(self, event: ReserveRequested) -> Steps[Reserved]:
        """Reserve the buffer for the next version, and abandon a version still being staged."""
        state = self._state
        is_known = self.newest_version >= 0 or self._next_version("") <= 1
        if event.is_part and not is_known:
            raise WeightsRefused(UNKNOWN_BASE)
        if (failure := state.take_failure()) is not None:
            raise failure
        if event.first_bad is not None:
            yield from self._retract(event.call, event.first_bad)
        yield Wait(lambda: state.reserved_for is None)
        state.reserved_for = self.name
        version = self._supersede()
        try:
            is_late = yield Wait(lambda: self.is_writable, self._timeout_s)
        except GeneratorExit:
            self.unreserve()
            raise
        if is_late and self.update is not None:
            error = self._lagging(sorted(self.update.staging))
            self.unreserve()
            state.give_up(error.engines, str(error))
            raise error
        return self._reserved(version, event)

    def _retract(self, call_id: int, first_bad: int) -> Steps[None]:
        """Take versions back. Engines are paused before, so that no turn continues from KV that
        bad weights computed."""
        pauses, state = self._pauses, self._state
        bad_before, pauses.bad_until = pauses.bad_until, self._newest_assigned
        try:
            yield from pauses.apply()
        except GeneratorExit:  # no version was taken back yet
            pauses.bad_until = bad_before
            state.begin(call_id, pauses.apply(), is_alone=True)
            raise
        pauses.bad_until = self._newest_assigned
        self._is_retracted = False
        state.command(RetractVersions(first_bad))
        yield Wait(lambda: self._is_retracted)

    def on_retracted(self) -> None:
        """Record that the groups of the retracted versions are discarded."""
        self._is_retracted = True

    @property
    def _newest_assigned(self) -> int:
        """Newest number in use. A version that was given up leaves its number to the next one."""
        coming = self.update.version if self.is_undecided and self.update is not None else 0
        return max(coming, self.newest_version, self._assigned_version)

    def _supersede(self) -> int:
        """Abandon an unreleased version, because the next is about to be written; return its
        number.

        ``start`` of the new version stops the engines that copy the old version. Each such engine
        replies that it failed, or that it had staged the old version. If both versions have the
        same number, their replies look alike, so the old version's copies must end first.
        """
        update, before = self.update, self._base
        if update is not None and self.is_undecided:
            self._assigned_version = update.version
            self._stop_timer()
        # The run learns of a release only after this event, which may have released one.
        used = max(self._assigned_version, self.newest_version)
        version = max(self._next_version(""), used + 1)
        if update is not None and not update.is_released:
            self._withdraw()
            self._base = before  # it has not failed, so the newer version contains its tensors
            engines = self._state.engines
            if update.version != version:
                names = sorted(update.staging)
                self._state.send([(n, engines[n].start_message(version)) for n in names])
        return version

    def _reserved(self, version: int, request: ReserveRequested) -> Reserved:
        before, keep, delta_base_version = self._base, self.kept_buffers, None
        if request.has_deltas:
            layers = len({part.version for part in before.content.overlays}) if before else 0
            has_room = before is None or before.content.has_room_for_patches
            delta_base_version = self.base_version if layers < LAYERS_MAX and has_room else UNKNOWN
        # A whole set keeps the adapters of before, and the draft model if it brings none.
        needs_before = request.is_part or delta_base_version is not None or self.base_adapters
        if before is not None and (needs_before or before.content.draft):
            keep |= before.content.buffers
        return Reserved(
            version, keep, self.base_version if request.is_part else None, delta_base_version
        )

    def unreserve(self) -> None:
        """Free the reserved buffer; a version that was abandoned for it stays abandoned."""
        self._state.reserved_for = None
        if self.update is not None and self.update.is_withdrawn:
            self._base = self.kept
        if not self.is_undecided:
            for each in [p for p in self._publishes if p.version > self.newest_version]:
                self._end(each, PublishDropped(version=each.version))
        self.catch_up()

    @override
    def publish(self, event: PublishRequested) -> None:
        super().publish(event)
        self._base = self.update

    @override
    def _withdraw(self) -> None:
        super()._withdraw()
        self._base = self.kept

    @override
    def _end(self, publish: Publish, error: TidegateError | None = None) -> None:
        content = None if self.kept is None else self.kept.content
        is_good = content is not None and content.whole_version > (self._pauses.bad_until or 0)
        if self._pauses.bad_until is None or not is_good or error is not None:
            super()._end(publish, error)
            return
        self._publishes.remove(publish)
        steps, is_alone = self._resume(), publish.is_resolved
        self._state.begin(publish.call_id, steps, is_shielded=True, is_alone=is_alone)

    def _resume(self) -> Steps[None]:
        """Have engines resume after a rollback, because good weights are live on all of them."""
        self._pauses.bad_until = None
        yield from self._pauses.apply()

    # ------------------------------------------------------------ engines

    def _is_outdated(self, engine: str, version: int) -> bool:
        known = self._state.engines.get(engine)
        return known is None or known.is_outdated(version)

    @override
    def on_staged(self, engine: str, version: int) -> None:
        if not self._is_outdated(engine, version):
            super().on_staged(engine, version)

    @override
    def on_refused(self, engine: str, version: int, why: str) -> bool:
        return not self._is_outdated(engine, version) and super().on_refused(engine, version, why)

    @override
    def on_live(self, engine: str, version: int) -> None:
        if (known := self._state.engines.get(engine)) is not None:
            known.version = version
        super().on_live(engine, version)
