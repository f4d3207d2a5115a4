"""Trainers' handles of LoRA adapters with weight versions of their own.

``rollouts.adapter("critic")`` returns a handle that publishes versions, and
``await rollouts.train_adapter("critic", …)`` one that also gets batches. A publish of one adapter
affects no turn of the base or of another adapter: none pauses, recomputes KV or ages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError, ResumeMismatch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rules import (
    check_can_be_made_again,
    describe,
    record_of,
)
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import SET_BY_POLICY, RunSettings, StalenessSettings
from tidegate.orchestrator.telemetry.recorder import Recorder
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.trainer.batch_handle import (
    BatchHandle,
    LocalHandle,
    SyncBatchHandle,
    as_work,
)
from tidegate.orchestrator.trainer.batch_metrics import OnBatch
from tidegate.orchestrator.trainer.handle import (
    HELD_OUT,
    BatchesOfPublish,
    Evaluation,
    blocking,
    in_thread,
    numbers_of,
    run_blocking,
)
from tidegate.orchestrator.trainer.run import Run
from tidegate.orchestrator.weight_sync.adapter_files import (
    LoadedAdapter,
    checked_name,
    load_adapter,
)
from tidegate.orchestrator.weight_sync.parts import ArchivedAdapter, WeightParts
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels.checksums import write_checked

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.batches.batches import Batch


class AdapterHandle(LocalHandle):
    """One adapter of a run, for its trainer. Turns select it by ``generate(adapter=name)``."""

    _is_archived_by_run = True
    """Whether the run's records have its versions, instead of records of its own."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self.name = checked_name(name)
        """Name of the adapter in its run."""
        self._version = 0

    @property
    def version(self) -> int:
        """Number of the newest version that this handle published; 0 before the first."""
        return self._version

    @property
    def _running(self) -> Run:
        return self._run

    async def publish(
        self, adapter: "Mapping[str, torch.Tensor] | str | Path", *, config: object = None
    ) -> int:
        """Bring new tensors of the adapter to the engines; return their version.

        The arguments are those of :meth:`Rollouts.publish_adapter`. Versions count this adapter's
        publishes from 1. Returns once every engine serves the version. The run's ``pause_mode`` and
        ``kv_policy`` apply to the turns of this adapter alone; with ``wait`` its running turns end
        under the version that they have, and new ones use the new one at once. Publishes of one
        adapter run one after another, those of several side by side.

        Raises:
            ConfigError: it is not a LoRA adapter, or an engine or the weight channel cannot serve
                adapters with versions of their own.
            WeightsRefused: it does not fit the model; the old version stays live.
            EngineLagging: an engine did not receive it in time, and was removed.
        """
        return await self._publish_version(adapter, config, None)

    async def _publish_version(
        self,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        config: object,
        name_batches: Callable[[Scheduler], Callable[[], None]] | None,
    ) -> int:
        """Publish a version. ``name_batches`` refuses batches that it can't be made from, and
        returns what tells the core which it is made from."""
        loaded = load_adapter(adapter, config)

        def write(buffer: int, keep: Collection[int]) -> list[UpdateWeights]:
            return write_adapter(self._run, buffer, loaded, keep)

        async def work(scheduler: Scheduler) -> int:
            if self.name in scheduler.control.state.weights.base_adapters:
                raise ConfigError(
                    f"adapter {self.name!r} is a part of the run's weights, because "
                    f"publish_adapter published it; unload it first, or use another name"
                )
            return await scheduler.engines.adapters.publish(
                self.name,
                loaded,
                write,
                name_batches=None if name_batches is None else name_batches(scheduler),
                is_archived=self._is_archived_by_run,
            )

        version = await self._do(work)
        self._version = max(self._version, version)
        self._published(version, loaded)
        return version

    def _published(self, version: int, loaded: LoadedAdapter) -> None:
        """Record a version that engines serve."""

    async def pin(self, version: int | None = None) -> int:
        """Keep a version (default: the live one) until each pin of it is undone; return it.

        Turns use it by ``generate(adapter=name, adapter_version=version)``, whatever is published
        meanwhile.

        Raises:
            WeightsRefused: the version is not there any more.
        """
        return await self._do(
            as_work(lambda scheduler: scheduler.engines.adapters.pin(self.name, version))
        )

    async def unpin(self, version: int) -> None:
        """Undo one :meth:`pin`. Engines drop the version once they need the memory."""
        await self._do(
            as_work(lambda scheduler: scheduler.engines.adapters.unpin(self.name, version))
        )

    async def unload(self) -> None:
        """Have engines drop the adapter, pinned versions included. Turns that use it are refused.

        A later publish continues the version numbers.

        Raises:
            WeightsRefused: it is not loaded.
        """
        await self._do(lambda scheduler: scheduler.engines.adapters.unload(self.name))


class AdapterTrainer(AdapterHandle, BatchHandle):
    """One adapter that a run trains: versions out, and batches of its own rollouts in.

    Its groups, batches, staleness bound, admission and ledger are its own. Its episodes sample the
    adapter's live version, and every token of its batches is tagged with the adapter's own version
    number. Publish a first version before the first batch.
    """

    _is_archived_by_run = False

    def __init__(
        self,
        run: Run,
        name: str,
        settings: RunSettings,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        """``settings``: those of the run, with the adapter's own batch and staleness settings."""
        AdapterHandle.__init__(self, run, name)
        BatchHandle.__init__(self, on_batch)
        self._adapter = self.name
        self._settings = settings
        self._records: Recorder | None = None
        self._is_resumed = False
        self._final: RunStatistics | None = None
        self.is_closed = False
        """Whether the adapter is trained no longer."""

    @property
    def _recorder(self) -> Recorder | None:
        return self._records

    @property
    def _has_evaluation_engines(self) -> bool:
        return False

    async def evaluate(
        self,
        tasks: Sequence[Any],
        *,
        episode: EpisodeFunction,
        name: str | None = HELD_OUT,
        version: int | None = None,
    ) -> Evaluation:
        """As :meth:`tidegate.Rollouts.evaluate`, with the adapter's live version.

        Raises:
            ConfigError: ``version`` is given: engines are pinned to versions of the run's weights.
        """
        if version is not None:
            raise ConfigError(
                f"evaluate(version={version}) pins the run's weights; for a version of adapter "
                f"{self.name!r} call pin({version}), and generate(adapter={self.name!r}, "
                f"adapter_version={version}) in an evaluation of the run"
            )
        return await super().evaluate(tasks, episode=episode, name=name)

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one; then publish the checkpoint's tensors first."""
        return self._is_resumed

    async def _start(self) -> None:
        """Start training the adapter, or continue after a resume.

        Raises:
            ConfigError: its rules can't be journalled.
            ResumeMismatch: it was trained by other rules before the resume.
        """
        rules = self._settings.rules()
        if self._run.run_id:
            check_can_be_made_again(rules)

        async def work(scheduler: Scheduler) -> None:
            known = scheduler.core.trained_adapters.get(self.name)
            if known is not None:
                resume(known)
            self._records = self._new_recorder(scheduler)  # first, because it may be refused
            if known is None:
                await scheduler.train_adapter(self.name, rules)
            self._side(scheduler).recorder = self._records

        def resume(known: Core) -> None:
            before, now = record_of(known.rules), record_of(rules)
            if changed := [key for key in now if before.get(key) != now[key]]:
                raise ResumeMismatch(
                    f"adapter {self.name!r} was trained with {changed[0]}="
                    f"{describe(before.get(changed[0]))}, and can't continue with "
                    f"{changed[0]}={describe(now[changed[0]])}; set the old value"
                )
            self._is_resumed = True
            self._version, self._received = known.trainer_version, known.handed.count

        await self._do(work)

    def _new_recorder(self, scheduler: Scheduler) -> Recorder | None:
        if self._run.observers is None:
            return None
        batches = self._received if self._is_resumed else None
        recorder = self._run.observers.open_adapter(self.name, self._settings, batches)
        if recorder is not None:
            for engine in scheduler.fleet.engines.values():
                recorder.engine_dtype(engine.hello.engine, engine.hello.dtype)
        return recorder

    def _end_records(self, statistics: RunStatistics | None) -> None:
        """Write the adapter's last records. Harmless if repeated.

        Raises:
            RecordingFailed: the disk refused some.
        """
        recorder, self._records = self._records, None
        self._final = statistics
        if recorder is not None:
            if statistics is not None:
                recorder.finish(statistics)
            recorder.close()

    def statistics(self) -> RunStatistics:
        """Return a snapshot of the adapter's groups, versions and tokens, and of the run's engines;
        once it is closed or the run has ended, the final one.

        The evaluation ledger and the episodes' times are those of the whole run.
        """
        if self._final is not None:
            return self._final
        return self._run.submit(as_work(self._statistics_of)).result()

    async def next_batch(self) -> "Batch | None":
        """As :meth:`tidegate.Rollouts.next_batch`.

        Raises:
            ConfigError: the adapter has no version yet, so nothing can be sampled.
        """
        if not self._version:
            raise ConfigError(
                f"adapter {self.name!r} has no version to sample with; publish() its first tensors "
                f"before the first batch (new LoRA adapters have B = 0, which equals the base)"
            )
        return await super().next_batch()

    async def publish(
        self,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        batches: "BatchesOfPublish" = None,
        config: object = None,
    ) -> int:
        """Publish the adapter's next version, as :meth:`AdapterHandle.publish`. Its batches are
        held back until the version is certain to succeed.

        ``batches`` are those that the version was made from, as of :meth:`Rollouts.publish`.

        Raises:
            PublishUnclear, BatchNotHeld: as :meth:`Rollouts.publish`, too.
        """
        numbers = numbers_of(batches, None)

        def name_batches(scheduler: Scheduler) -> Callable[[], None]:
            side = self._side(scheduler)
            named = side.batches_of_publish(numbers)
            self._named = max(self._named, *named, 0)
            return partial(side.name_batches, named)

        self._mark("train")
        try:
            return await self._publish_version(adapter, config, name_batches)
        finally:
            self._mark("publish")

    def _published(self, version: int, loaded: LoadedAdapter) -> None:
        if self._records is not None:
            adapters = {self.name: ArchivedAdapter(version, loaded.scale)}
            parts = WeightParts(over=0, is_adapter=True, adapters=adapters)
            self._records.weights(version, loaded.tensors, parts)

    async def rollback(
        self,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        config: object = None,
        first_bad: int | None = None,
    ) -> int:
        """Serve these tensors in place of bad ones, under a new version; return it.

        Groups of the adapter with a token of version ``first_bad`` or newer (default: the newest
        published) are discarded as ``rolled_back``, and their tasks are repeated. The adapter's
        turns are paused meanwhile, and stay paused if the publish fails.
        """
        bad = self._version if first_bad is None else first_bad
        await self.pause()
        retracted = ev.VersionRetracted(bad)
        await self._do(as_work(lambda scheduler: self._side(scheduler).handle(retracted)))
        version = await self.publish(adapter, batches=[], config=config)
        await self.resume()
        return version

    async def pause(self) -> None:
        """Take the adapter's turns back from the engines. They keep their tokens and continue from
        there at :meth:`resume`; its episodes' timeouts do not run meanwhile. No other turn is
        affected."""
        await self._halt(True)

    async def resume(self) -> None:
        """Continue the adapter's turns. Harmless if they are not paused."""
        await self._halt(False)

    async def _halt(self, is_halted: bool) -> None:
        await self._do(as_work(lambda scheduler: scheduler.halt_adapter(self.name, is_halted)))

    async def close(self) -> None:
        """Stop training the adapter, and discard what was not trained. The adapter stays
        published; :meth:`unload` drops it.

        Raises:
            ConfigError: another trainer's episodes sample it as their agent.
        """

        def end(scheduler: Scheduler) -> RunStatistics:
            final = self._statistics_of(scheduler)
            scheduler.end_adapter(self.name)
            self.is_closed = True
            return final

        await in_thread(self._end_records, await self._do(as_work(end)))


def adapter_settings(settings: RunSettings, changes: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a trained adapter: the run's, with other staleness settings.

    Raises:
        ConfigError: a setting is unknown or not valid.
    """
    known = StalenessSettings.model_fields
    if unknown := sorted(changes.keys() - known.keys()):
        raise ConfigError(
            f"train_adapter() takes the settings of batches and staleness ({', '.join(known)}), "
            f"got {', '.join(unknown)}; give the others to serve()"
        )
    own = settings.staleness
    values = {name: getattr(own, name) for name in own.model_fields_set} | dict(changes)
    if "staleness_policy" in changes or (
        own.staleness_policy is not None and SET_BY_POLICY & changes.keys()
    ):
        for name in SET_BY_POLICY if "staleness_policy" in changes else ("staleness_policy",):
            values.pop(name, None)
    return settings.model_copy(update={"staleness": StalenessSettings(**values)})


class SyncAdapterHandle:
    """Sync variant of :class:`AdapterHandle`, whose calls block."""

    def __init__(self, handle: AdapterHandle) -> None:
        self._handle = handle

    @property
    def name(self) -> str:
        """As :attr:`AdapterHandle.name`."""
        return self._handle.name

    @property
    def version(self) -> int:
        """As :attr:`AdapterHandle.version`."""
        return self._handle.version

    publish = blocking(AdapterHandle.publish)
    pin = blocking(AdapterHandle.pin)
    unpin = blocking(AdapterHandle.unpin)
    unload = blocking(AdapterHandle.unload)


class SyncAdapterTrainer(SyncBatchHandle, SyncAdapterHandle):
    """Sync variant of :class:`AdapterTrainer`, whose calls block."""

    _handle: AdapterTrainer

    def __init__(self, handle: AdapterTrainer) -> None:
        super().__init__(handle)

    def publish(  # written out: else type checkers see the base class's arguments
        self,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        batches: "BatchesOfPublish" = None,
        config: object = None,
    ) -> int:
        """Publish a version and wait for it, as :meth:`AdapterTrainer.publish` does."""
        return run_blocking(self._handle.publish(adapter, batches=batches, config=config))

    rollback = blocking(AdapterTrainer.rollback)
    pause = blocking(AdapterTrainer.pause)
    resume = blocking(AdapterTrainer.resume)
    close = blocking(AdapterTrainer.close)


def write_adapter(
    run: Run, buffer: int, adapter: LoadedAdapter, keep: Collection[int]
) -> list[UpdateWeights]:
    """Write an adapter to the run's weight channel; return messages that locate it. Blocks."""
    return write_checked(
        run.channel.write,
        buffer,
        named_buffers(adapter.tensors),
        keep=keep,
        has_checksums=run.settings.weights.weight_checksums,
    )
