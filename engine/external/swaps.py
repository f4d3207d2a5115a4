"""Swaps staged weights into an external engine: pauses it, loads them, and reports them live.

Every token of the old version is sent before the new version is reported live, and no request is
made in between.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from tidegate.engine.external.adapter import EngineAdapter
from tidegate.engine.external.host_weights import HostWeights, PublishedDirectories
from tidegate.engine.external.loras import LoadedLora, LoraRegistry, names_of
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.streams import Streams
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.pauses import ends_turns
from tidegate.engine.weights.staging import Live, Staging
from tidegate.errors import EngineGone, WeightsRefused
from tidegate.transport.limits import cut
from tidegate.transport.message import keeps_kv
from tidegate.transport.messages import FinishWeightUpdate, WeightsFailed, WeightsLive
from tidegate.transport.printable import print_stderr
from tidegate.transport.weight_channels.patches import ElementPatch

Patches = Sequence[tuple[str, torch.dtype, ElementPatch]]


class WeightSwapper:
    """The host copy of the engine's weights, and the operation that replaces them."""

    def __init__(
        self,
        adapter: EngineAdapter,
        link: OrchestratorLink,
        *,
        staging: Staging,
        weights: HostWeights,
        directories: PublishedDirectories,
        label: str,
        make_label: Callable[[int], str],
    ) -> None:
        """``label`` names the model directory's weights; ``make_label`` makes a new name for a
        version at each call."""
        self._adapter = adapter
        self._takes_patches = adapter.capabilities.takes_patches
        """Whether versions that came as patches are passed on as patches; not after a failure."""
        self._link = link
        self._staging = staging
        self._weights = weights
        self._matches_engine = True
        """Whether ``_weights`` equal the weights in the engine."""
        self._directories = directories
        self._first_label = label
        self._make_label = make_label
        self.loras = LoraRegistry(adapter, directories.model, directories.parent)
        self._prepared: tuple[Mapping[str, object], dict[str, LoadedLora]] | None = None
        """Adapters of a staged version, and which of them the engine has loaded."""
        self.is_swapping = False
        self.has_swapped = False
        """Whether the engine has ever loaded other weights than the model directory's."""

    def live(self, version: int) -> Live | None:
        """Return the base of partial sets; None if the engine's weights are unknown."""
        return Live(version, self._weights) if self._matches_engine else None

    async def prepare(self, version: int) -> bool:
        """Load a staged version's adapters beside those in use.

        False if the version is no longer staged, for example because the engine refuses an adapter.
        """
        adapters = self._staging.staged_adapters(version)
        if adapters is None:
            return False
        if self._prepared is not None:
            self.loras.drop(self._prepared[1])
            self._prepared = None
        try:
            self._prepared = adapters, await self.loras.load(adapters, self._make_label(version))
        except WeightsRefused as error:
            self._staging.refuse(version, cut(str(error)))
        return self._staging.is_staged(version)

    async def _take_loaded(
        self, adapters: Mapping[str, object], label: str
    ) -> dict[str, LoadedLora]:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is adapters:
            return prepared[1]
        return await self.loras.load(adapters, label)

    async def swap(
        self,
        update: FinishWeightUpdate,
        streams: Streams,
        scores: ExternalScoreQueue,
        batcher: StepMessageBatcher,
        *,
        needs_weights: bool,
    ) -> WeightsFailed | None:
        """Load staged weights into the engine, pausing requests as the update says.

        Success is reported here, because no message may be sent between load and report; a failure
        is returned. With ``needs_weights`` the engine has no weights, so adapters alone do not
        suffice.
        """
        self.is_swapping = True
        label = self._make_label(update.version)
        live, adapters = self._weights, self._weights.adapters
        try:
            staged = self._staging.swap(update.version, live)
            assert isinstance(staged, HostWeights)
            self._weights, self._matches_engine = staged, staged is live
            self.has_swapped = True
            brings_weights = staged is not live or needs_weights
            patches = None if needs_weights else self._staging.last_patches
            loaded = await self._take_loaded(staged.adapters, label)
            try:
                load_weights = await self._prepare_load(
                    label, patches, brings_weights=brings_weights
                )
                scores.stop()
                started_ns = time.monotonic_ns()
                recomputed = await self._pause_requests(update, streams, loaded)
                await load_weights()
            except (WeightsRefused, OSError):
                self.loras.drop(loaded)
                raise
            await batcher.flush_all()  # the last tokens of the old weights
            batcher.version, self._matches_engine = update.version, True
            self.loras.set_live(loaded)
            self._report_live(update.version, started_ns, recomputed)
            await streams.set_weights(label, self.loras.names)
        except EngineGone:  # also an OSError, but the old weights cannot be served any more
            raise
        except (WeightsRefused, OSError) as error:
            self._directories.forget(label)
            if self._weights is live:
                live.adapters = adapters
            return WeightsFailed(version=update.version, message=cut(str(error)))
        finally:
            self.is_swapping = False
        return None

    def _report_live(self, version: int, started_ns: int, recomputed_turns: int) -> None:
        swapped_ns = time.monotonic_ns()
        self._link.send(
            WeightsLive(
                version=version,
                swapped_us=swapped_ns // 1000,
                recomputed_turns=recomputed_turns,
                stall_us=(swapped_ns - started_ns) // 1000,
            )
        )

    async def _prepare_load(
        self, label: str, patches: Patches | None, *, brings_weights: bool
    ) -> Callable[[], Awaitable[None]]:
        """Return the call that changes the weights during the pause. Files are written before the
        pause."""
        if not brings_weights:
            return partial(self._adapter.rename_weights, label)
        if self._adapter.capabilities.takes_tensors:
            return partial(self._adapter.load_tensors, self._weights.by_name, label)
        if self._takes_patches and patches is not None:
            file = await asyncio.to_thread(
                self._directories.write_patches, self._weights, patches, label
            )
            if file is not None:
                return partial(self._load_patches, file, label)
        directory = await asyncio.to_thread(self._directories.write, self._weights, label)
        return partial(self._adapter.load_weights, directory, label)

    async def _load_patches(self, file: Path, label: str) -> None:
        """Change elements of the engine's weights; if it fails, load all, now and from now on."""
        try:
            await self._adapter.load_patches(file, label)
        except WeightsRefused as refusal:
            self._takes_patches = False
            print_stderr(f"{refusal}; loading all weights, also in later updates")
            try:
                directory = await asyncio.to_thread(self._directories.write, self._weights, label)
                await self._adapter.load_weights(directory, label)
            except (WeightsRefused, OSError) as error:
                raise EngineGone(
                    f"the engine's weights are unknown: changing elements failed ({refusal}), and "
                    f"then loading all ({error}); restart the server"
                ) from error

    async def reload(self) -> None:
        """Load the model directory's weights again after the engine has lost them."""
        assert not self.has_swapped, "the live weights are not the directory's"
        if self._adapter.capabilities.takes_tensors:
            await self._adapter.load_tensors(self._weights.by_name, self._first_label)
        else:
            await self._adapter.load_weights(self._directories.model, self._first_label)

    async def _pause_requests(
        self, update: FinishWeightUpdate, streams: Streams, loaded: Mapping[str, LoadedLora]
    ) -> int:
        """Pause as the update says; return how many turns must be requested again."""
        if (
            keeps_kv(update.pause_mode, update.kv_policy)
            and self._adapter.capabilities.keeps_kv
            and streams.send_every_token()
        ):
            await streams.freeze()
            await streams.abort_unstarted()
            return await streams.abort_changed_adapters(names_of(loaded))
        return await streams.stop(ends_turns=ends_turns(update.pause_mode))
