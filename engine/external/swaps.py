"""Swaps staged weights into an external engine: pause, load, and the report that they are live.

Used by ``ExternalEngineLoop``. Order matters: every token of the old version is sent before the new
version is reported live, and no request is made in between."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tidegate.engine.external.adapter import Capabilities, EngineAdapter
from tidegate.engine.external.host_weights import HostWeights, PublishedDirectories
from tidegate.engine.external.loras import Loaded, LoraRegistry, names_of
from tidegate.engine.external.scoring import ExternalScoreQueue
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.streams import Streams
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.weights.staging import Live, Staging
from tidegate.errors import EngineGone, WeightsRefused
from tidegate.transport.limits import cut
from tidegate.transport.messages import FinishWeightUpdate, WeightsFailed, WeightsLive


class WeightSwapper:
    """The host copy of the engine's weights, and the operation that replaces them."""

    def __init__(
        self,
        adapter: EngineAdapter,
        able: Capabilities,
        link: OrchestratorLink,
        *,
        staging: Staging,
        weights: HostWeights,
        directories: PublishedDirectories,
        label: str,
        label_of: Callable[[int], str],
    ) -> None:
        """``label`` names the model directory's weights; ``label_of`` makes a new name for a
        version at each call."""
        self._adapter = adapter
        self._able = able
        self._link = link
        self._staging = staging
        self._weights = weights
        self._is_copy_right = True
        """Whether ``_weights`` equal the engine's."""
        self._directories = directories
        self._first_label = label
        self._label_of = label_of
        self.loras = LoraRegistry(adapter, directories.model, directories.parent)
        self._ready: tuple[Mapping[str, object], dict[str, Loaded]] | None = None
        """A staged version's adapters, and those of them that the engine has loaded."""
        self.is_swapping = False
        self.has_swapped = False
        """Whether the engine was ever given other weights than the model directory's."""

    def live(self, version: int) -> Live | None:
        """Return the base of partial sets; None if the engine's weights are unknown."""
        return Live(version, self._weights) if self._is_copy_right else None

    async def prepare(self, version: int) -> bool:
        """Load a staged version's adapters beside those in use.

        False if the version is no longer staged, for example because the engine refuses an adapter.
        """
        adapters = self._staging.staged_adapters(version)
        if adapters is None:
            return False
        if self._ready is not None:
            self.loras.drop(self._ready[1])
            self._ready = None
        try:
            self._ready = adapters, await self.loras.load(adapters, self._label_of(version))
        except WeightsRefused as error:
            self._staging.refuse(version, cut(str(error)))
        return self._staging.is_staged(version)

    async def _loaded(self, adapters: Mapping[str, object], label: str) -> dict[str, Loaded]:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is adapters:
            return ready[1]
        return await self.loras.load(adapters, label)

    async def swap(
        self,
        update: FinishWeightUpdate,
        streams: Streams,
        scores: ExternalScoreQueue,
        teller: StepMessageBatcher,
        *,
        needs_weights: bool,
    ) -> WeightsFailed | None:
        """Load staged weights into the engine, pausing requests as the update says.

        Reports success itself, because nothing may be sent in between; returns a failure. With
        ``needs_weights`` the engine has no weights, so adapters alone do not suffice.
        """
        self.is_swapping = True
        label = self._label_of(update.version)
        serves, adapters = self._weights, self._weights.adapters
        try:
            staged = self._staging.exchange(update.version, serves)
            assert isinstance(staged, HostWeights)
            self._weights, self._is_copy_right = staged, staged is serves
            self.has_swapped = True
            brings_weights = staged is not serves or needs_weights
            loaded = await self._loaded(staged.adapters, label)
            try:
                bring = await self._bringing(label, brings_weights=brings_weights)
                scores.stop()
                begun_ns = time.monotonic_ns()
                recomputed = await self._quieten(update, streams, loaded)
                await bring()
            except (WeightsRefused, OSError):
                self.loras.drop(loaded)
                raise
            await teller.all_told()  # the last tokens of the old weights
            teller.version, self._is_copy_right = update.version, True
            self.loras.serve(loaded)
            self._say_live(update.version, begun_ns, recomputed)
            await streams.new_weights(label, self.loras.names)
        except EngineGone:  # also an OSError, but the old weights cannot be served any more
            raise
        except (WeightsRefused, OSError) as error:
            self._directories.forget(label)
            if self._weights is serves:
                serves.adapters = adapters
            return WeightsFailed(version=update.version, message=cut(str(error)))
        finally:
            self.is_swapping = False
        return None

    def _say_live(self, version: int, begun_ns: int, recomputed_turns: int) -> None:
        swapped_ns = time.monotonic_ns()
        self._link.send(
            WeightsLive(
                version=version,
                swapped_us=swapped_ns // 1000,
                recomputed_turns=recomputed_turns,
                stall_us=(swapped_ns - begun_ns) // 1000,
            )
        )

    async def _bringing(self, label: str, *, brings_weights: bool) -> Callable[[], Awaitable[None]]:
        """Return the call that changes the weights during the pause; files are
        written before it."""
        if not brings_weights:
            return partial(self._adapter.rename_weights, label)
        if self._able.takes_tensors:
            return partial(self._adapter.load_tensors, self._weights.by_name, label)
        directory = await asyncio.to_thread(self._directories.write, self._weights, label)
        return partial(self._adapter.load_weights, directory, label)

    async def reload(self) -> None:
        """Load the model directory's weights again after the engine has lost them."""
        assert not self.has_swapped, "the directory's weights are of the past"
        if self._able.takes_tensors:
            await self._adapter.load_tensors(self._weights.by_name, self._first_label)
        else:
            await self._adapter.load_weights(self._directories.model, self._first_label)

    async def _quieten(
        self, update: FinishWeightUpdate, streams: Streams, loaded: Mapping[str, Loaded]
    ) -> int:
        """Pause as the update says; return how many turns must be requested again."""
        if update.kv_policy == "keep" and update.pause_mode != "abort" and self._able.keeps_kv:
            await streams.freeze()
            await streams.cut_unbegun()
            return await streams.cut_changed(names_of(loaded))
        return await streams.stop(are_over=update.pause_mode == "abort")
