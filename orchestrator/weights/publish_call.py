"""How does one call to publish go, from a state dict to engines? Reserve, write, bring.

It runs on the run's loop, so that a caller that gives up at any instant leaves nothing reserved;
and what is being written then is written to its end, for nobody else may write there before.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.run import Run
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.weights.channel import write_on_gpu
from tidegate.orchestrator.weights.content import Change, WeightContent, anew, laid_over
from tidegate.orchestrator.weights.deltas import LAYERS_MAX, UNKNOWN
from tidegate.orchestrator.weights.parts import WHOLE, ArchivedAdapter
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels.checksums import checksums, with_checksums
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcSender

if TYPE_CHECKING:
    import torch


class PublishCall:
    """One set of weights on its way."""

    def __init__(
        self,
        run: Run,
        state_dict: "Mapping[str, torch.Tensor]",
        wait: PublishWait,
        *,
        partial: bool = False,
    ) -> None:
        """Checks what is asked for. A ``partial`` state dict has only what changes.

        Raises:
            ConfigError: there is no such thing to wait for.
        """
        if wait not in get_args(PublishWait):
            raise ConfigError(f"publish waits until 'live', 'staged' or 'none', got wait={wait!r}")
        self._run = run
        self.state_dict = state_dict
        self._wait: PublishWait = wait
        self._change: Change = laid_over if partial else anew
        self._is_part = partial
        """Whether the version has more than these tensors."""
        self._over: int | None = None
        self.version = -1
        """-1 until one is reserved."""
        self.parts = WHOLE
        """What the version is made of beside these tensors."""
        self._has_returned = False
        self._before: int | None = None
        """What tensors that are as they were may be left out over; None: none may be."""

    @property
    def may_be_served(self) -> bool:
        """Whether an engine may serve it, or will unless that fails behind the caller's back."""
        scheduler = self._run.scheduler
        if scheduler is None or self.version < 0:
            return False
        return self._has_returned or scheduler.control.publisher.newest_version >= self.version

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the weights to the engines; their version.

        Raises:
            EngineLagging, WeightsRefused, PublishDropped: as :meth:`Publisher.publish`.
        """
        if self._is_part and not scheduler.control.publisher.knows_before:
            raise WeightsRefused(
                "this run goes on with another's weights, and hasn't got those that a part of a "
                "set or an adapter would be laid over; publish a whole state dict first, the model "
                "directory's if only adapters are trained"
            )
        version = await scheduler.control.publisher.reserve()
        try:
            weights = scheduler.control.weights
            keep = weights.kept_buffers
            if self._run.settings.weight_deltas and self._change is anew:
                is_deep = weights.layers_before >= LAYERS_MAX
                self._before = UNKNOWN if is_deep else weights.version_before
            # A whole set keeps the adapters of before.
            if self._is_part or self._before is not None or weights.adapters_before:
                keep |= weights.buffers_before
            self._over = weights.version_before if self._is_part else None
            chunks = await self._written(version, keep)
        except BaseException:
            scheduler.control.publisher.release()
            raise
        self.version = version
        await scheduler.control.publisher.publish(version, chunks, self._wait, self._changed)
        self._has_returned = True
        return version

    def _changed(self, before: WeightContent, parts: Sequence[UpdateWeights]) -> WeightContent:
        content = self._change(before, parts)
        adapters = {
            name: ArchivedAdapter(part.version, part.adapter.scale)
            for name, (part, *_) in content.adapters.items()
            if part.adapter is not None
        }
        self.parts = msgspec.structs.replace(self.parts, over=self._over, adapters=adapters)
        return content

    async def _written(self, version: int, keep: set[int]) -> list[UpdateWeights]:
        """Have a thread put the weights where engines can read them."""
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(None, self._write, version, keep)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await writing
            raise

    def _write(self, version: int, keep: set[int]) -> list[UpdateWeights]:
        written, settings = self._run.written, self._run.settings
        written.forget(version)
        if self._is_part and not self.state_dict:
            return []
        channel = self._run.channel
        if isinstance(channel, CudaIpcSender):
            return write_on_gpu(
                channel,
                version,
                self.state_dict,
                keep=keep,
                has_checksums=settings.weight_checksums,
            )
        from tidegate.orchestrator.feed.batches import (
            named_buffers,  # torch: not for who only audits
        )

        buffers = named_buffers(self.state_dict)
        if self._before is not None:
            others = written.changed(version, buffers, before=self._before)
            if others is not None:
                buffers, self._change = others, laid_over
            if not buffers:
                return []
        # Of what is sent, not of what was written: so an error in between shows too.
        sums = checksums(buffers) if settings.weight_checksums else {}
        chunks = channel.write(version, buffers, keep=keep)
        return with_checksums(chunks, sums) if sums else chunks


class RollbackCall(PublishCall):
    """Good weights that take the place of bad ones."""

    def __init__(
        self, run: Run, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int
    ) -> None:
        """``first_bad``: from this version on, what was published is bad."""
        super().__init__(run, state_dict, "live")
        if first_bad < 1:
            raise ConfigError(
                f"first_bad={first_bad}: version 0 is the model directory's, and what is published "
                f"counts from 1; there is nothing before it to roll back to"
            )
        self._first_bad = first_bad

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the weights to the engines, paused meanwhile; their version.

        Aborted, so that no turn goes on from KV that bad weights computed.
        """
        await scheduler.control.stand_still(True)
        scheduler.handle([ev.VersionRetracted(self._first_bad)])
        version = await super().run(scheduler)
        await scheduler.control.stand_still(False)
        return version
