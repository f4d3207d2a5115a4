"""Weight updates that a trainer requests: publish, rollback, and LoRA adapters added or removed.

Trainers' handles and the vLLM-compatible server run them on the run's event loop: reserve the
weight channel, write the tensors in a thread, publish the version. A cancelled update leaves
nothing reserved; a write that has begun is finished first, because the channel has one writer at a
time. :mod:`tidegate.orchestrator.core.weight_control` decides everything else.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
from typing_extensions import override

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.core.control_events import PublishWait, Reserved
from tidegate.orchestrator.core.weight_content import (
    Change,
    WeightContent,
    patch_elements,
    replace_all,
    replace_some,
    with_adapter,
    without_adapter,
)
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.trainer.run import Run, WrittenByRanks
from tidegate.orchestrator.weight_sync.adapter_files import checked_name, load_adapter
from tidegate.orchestrator.weight_sync.control import finish_write
from tidegate.orchestrator.weight_sync.deltas import WrittenElements
from tidegate.orchestrator.weight_sync.parts import WHOLE, ArchivedAdapter, WeightParts
from tidegate.orchestrator.weight_sync.state_dict import (
    named_buffers,
    named_tensors,
    tensors_of,
    without_draft,
)
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart, joined
from tidegate.transport.messages import Adapter, UpdateWeights
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.checksums import write_checked
from tidegate.transport.weight_channels.cuda_memory import NamedTensor

if TYPE_CHECKING:
    import torch


class WeightPublish:
    """One publish of a state dict."""

    def __init__(
        self,
        run: Run,
        state_dict: "Mapping[str, torch.Tensor]",
        wait: PublishWait,
        *,
        partial: bool = False,
        batches: Sequence[int] | None = (),
        first_bad: int | None = None,
    ) -> None:
        """Check the arguments. A ``partial`` state dict has only the tensors that change.

        ``batches``: numbers of the batches that the weights were made from; None: those that the
        trainer holds, if it takes one at a time. ``first_bad``: of a rollback, the oldest of the
        bad versions; all newer ones are bad too, and engines are paused meanwhile.

        Raises:
            ConfigError: ``wait`` has no such value, or version ``first_bad`` can't be bad.
        """
        if wait not in get_args(PublishWait):
            raise ConfigError(f"wait must be 'live', 'staged' or 'none', got {wait!r}")
        if first_bad is not None and first_bad < 1:
            raise ConfigError(
                f"first_bad must be >= 1, because version 0 is the model directory's weights and "
                f"there are none before it; got {first_bad}"
            )
        self._run = run
        self.state_dict = state_dict
        self._wait: PublishWait = wait
        self._batches = batches
        self.named: Sequence[int] = ()
        """Batches that the publish has named."""
        self._change: Change = replace_some if partial else replace_all
        self._is_part = partial
        """Whether the version takes all other tensors from the version before."""
        self._reserved: Reserved | None = None
        self.version = -1
        """Version of the weights; -1 until one is reserved."""
        self.parts = WHOLE
        """Parts of the version besides these tensors, for the run's record."""
        self._has_returned = False
        self._first_bad = first_bad

    @property
    def may_be_served(self) -> bool:
        """Whether engines may serve the version, now or after the call has returned."""
        scheduler = self._run.scheduler
        if scheduler is None or self.version < 0:
            return False
        return self._has_returned or scheduler.control.state.weights.newest_version >= self.version

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the weights to the engines; return their version.

        Raises:
            EngineLagging, WeightsRefused, PublishDropped: as :meth:`EngineControl.publish`.
            PublishUnclear, BatchNotHeld: as :meth:`TrainerSide.batches_of_publish`.
        """
        _refuse_under_adapters(scheduler.engines.adapters.in_use)
        if without_draft(self.state_dict) is not self.state_dict:
            _refuse_undrafted(self._run.settings, scheduler.engines.fleet.engines)
        trainer, control = scheduler.trainer, scheduler.control
        batches = trainer.batches_of_publish(self._batches)
        has_deltas = bool(self._run.settings.weights.weight_deltas) and self._change is replace_all
        try:
            reserved = await control.reserve(
                is_part=self._is_part, has_deltas=has_deltas, first_bad=self._first_bad
            )
        except BaseException:
            with contextlib.suppress(ConfigError):  # the batches were trained on all the same
                trainer.name_batches(batches)
                self.named = batches
            raise
        self._reserved = reserved
        try:
            trainer.name_batches(batches)
            self.named = batches
            chunks = await self._write_in_thread(reserved)
        except BaseException:
            control.release()
            raise
        self.version = reserved.version
        await control.publish(reserved.version, chunks, self._wait, self._content_after)
        self._has_returned = True
        return reserved.version

    def _content_after(
        self, before: WeightContent, parts: Sequence[UpdateWeights]
    ) -> WeightContent:
        """Return the version's content, and list its parts for the record."""
        content = self._change(before, parts)
        adapters = {
            name: ArchivedAdapter(part.version, part.adapter.scale)
            for name, (part, *_) in content.adapters.items()
            if part.adapter is not None
        }
        over = None if self._reserved is None else self._reserved.over
        self.parts = msgspec.structs.replace(self.parts, over=over, adapters=adapters)
        return content

    async def _write_in_thread(self, reserved: Reserved) -> list[UpdateWeights]:
        """Write the weights to the channel, in a thread; return messages that locate them."""
        return await finish_write(asyncio.to_thread(self._write, reserved))

    def _write(self, reserved: Reserved) -> list[UpdateWeights]:
        version = reserved.version
        written, settings = self._run.written, self._run.settings.weights
        written.forget(version)
        self._run.written_by_ranks = None
        if self._is_part and not self.state_dict:
            return []
        if settings.channel.needs_gpu:
            return self._write_tensors(reserved, named_tensors(self.state_dict))
        buffers = named_buffers(self.state_dict)
        if (before := reserved.delta_base_version) is not None:
            if isinstance(written, WrittenElements):
                changed = written.changed(
                    version, buffers, before=before, has_checksums=settings.weight_checksums
                )
                change: Change = partial(patch_elements, before)
            else:
                changed, change = written.changed(version, buffers, before=before), replace_some
            if changed is not None:
                buffers, self._change = changed, change
            if not buffers:
                return []
        return self._write_tensors(reserved, buffers)

    def _write_tensors(
        self, reserved: Reserved, tensors: Sequence[NamedBuffer | NamedTensor]
    ) -> list[UpdateWeights]:
        return write_checked(
            self._run.channel.write,
            reserved.version,
            tensors,
            keep=reserved.keep,
            has_checksums=self._run.settings.weights.weight_checksums,
        )


def _refuse_under_adapters(adapters: Collection[str]) -> None:
    """Refuse to publish the run's weights while adapters with versions of their own are loaded:
    their tokens' tags would not show the change."""
    if adapters:
        raise ConfigError(
            f"the run's weights can't be published under adapters with versions of their own "
            f"({', '.join(sorted(adapters))}), whose tokens would be of other weights under the "
            f"same version; unload them first"
        )


def _refuse_undrafted(settings: RunSettings, engines: Mapping[str, Engine]) -> None:
    """Refuse a draft model's weights if no engine has a draft model."""
    methods = {each.hello.speculative_method for each in engines.values()}
    if "draft" in methods or (settings.engine.speculative_method or "").startswith("draft:"):
        return
    known = ", ".join(sorted(f"{name} ({each.hello.model_code})" for name, each in engines.items()))
    raise ConfigError(
        f"draft: no engine has a draft model whose weights a publish may replace (engines: "
        f"{known or 'none'}); serve with speculative_method='draft:DIRECTORY', which Tidegate's "
        f"own engines support and servers of engine_urls do not, or leave draft out"
    )


@dataclass(frozen=True, slots=True)
class PartsWanted:
    """Request to a trainer's ranks: the parts of a reserved version that they send."""

    version: int
    base_plan: str
    """Plan of the publish that patches may be made from; empty if none may be."""
    keep_copy: bool
    """Whether ranks should keep a copy, because the next publish may be one of patches."""
    has_checksums: bool


@dataclass(frozen=True, slots=True)
class CollectedParts:
    """Tensors of all ranks, as collected for one version."""

    plan: str
    """Name under which the ranks remember what they sent."""
    parts: Sequence[TensorPart]


CollectParts = Callable[[PartsWanted], Awaitable[CollectedParts]]
"""Has the ranks of a trainer send their parts of a version."""


class ShardedPublish(WeightPublish):
    """A publish or rollback whose tensors the ranks of a trainer send in parts."""

    def __init__(
        self,
        run: Run,
        collect: CollectParts,
        wait: PublishWait,
        *,
        partial: bool = False,
        batches: Sequence[int] | None = (),
        first_bad: int | None = None,
    ) -> None:
        super().__init__(run, {}, wait, partial=partial, batches=batches, first_bad=first_bad)
        self._collect = collect
        self._collected = CollectedParts("", ())

    @override
    async def _write_in_thread(self, reserved: Reserved) -> list[UpdateWeights]:
        self._collected = await self._collect(self._wanted(reserved))
        return await super()._write_in_thread(reserved)

    def _wanted(self, reserved: Reserved) -> PartsWanted:
        settings, run = self._run.settings.weights, self._run
        records = run.settings.records
        base = run.written_by_ranks
        # Archives are of whole tensors, which patches alone do not give.
        is_archived = records.run_directory is not None and records.archive_weights != "none"
        can_patch = settings.weight_deltas == "elements" and not is_archived
        is_base = base is not None and base.version == reserved.delta_base_version
        return PartsWanted(
            reserved.version,
            base.plan if base is not None and is_base and can_patch else "",
            keep_copy=can_patch and self._change is replace_all,
            has_checksums=settings.weight_checksums,
        )

    @override
    def _write(self, reserved: Reserved) -> list[UpdateWeights]:
        plan, buffers = self._collected.plan, joined(self._collected.parts)
        self._collected = CollectedParts("", ())
        self._run.written.forget(reserved.version)
        has_patches = any(buffer.patch is not None for buffer in buffers)
        if has_patches:
            assert reserved.delta_base_version is not None  # else no plan asks for patches
            self._change = partial(patch_elements, reserved.delta_base_version)
            chunks = self._write_tensors(reserved, buffers)
        else:
            self.state_dict = tensors_of(buffers)
            if isinstance(self._run.written, WrittenElements):
                # The ranks compare with their own copies, so the run keeps none.
                reserved = msgspec.structs.replace(reserved, delta_base_version=None)
            chunks = super()._write(reserved)
        self._run.written_by_ranks = WrittenByRanks(reserved.version, plan)
        return chunks


class AdapterPublish(WeightPublish):
    """A publish of a LoRA adapter, new or with new tensors."""

    def __init__(
        self,
        run: Run,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        config: object,
        wait: PublishWait,
        batches: Sequence[int] = (),
    ) -> None:
        """Read the adapter.

        Raises:
            ConfigError: it is not a LoRA adapter that engines can serve.
        """
        loaded = load_adapter(adapter, config)
        super().__init__(run, loaded.tensors, wait, partial=True, batches=batches)
        self._change = partial(with_adapter, Adapter(checked_name(name), loaded.scale))
        self.parts = WeightParts(is_adapter=True)


class AdapterRemoval(WeightPublish):
    """A publish of a version without one LoRA adapter."""

    def __init__(self, run: Run, name: str, wait: PublishWait) -> None:
        super().__init__(run, {}, wait, partial=True)
        self._name = name
        self._change = partial(without_adapter, name)

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the version without the adapter to the engines; return it.

        Raises:
            WeightsRefused: no adapter of this name is published; else as :meth:`WeightPublish.run`.
        """
        known = scheduler.control.state.weights.base_adapters
        if self._name not in known:
            raise WeightsRefused(
                f"no adapter {self._name!r} is published; published are {sorted(known) or 'none'}"
            )
        return await super().run(scheduler)
