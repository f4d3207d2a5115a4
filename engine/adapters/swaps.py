"""How do staged weights become what the engine computes with? A pause, and one call; maybe files.

Whose turn it is to swap, and what was staged, others know. Order is all: every token of the old
version is told before the new one is said to be live, and no request is made in between.
"""

import asyncio
import time
from collections.abc import Callable

from tidegate.engine.adapters.adapter import Capabilities, EngineAdapter
from tidegate.engine.adapters.host_weights import HostWeights, PublishedDirectories
from tidegate.engine.adapters.scoring import ScoreDesk
from tidegate.engine.adapters.streams import Streams
from tidegate.engine.adapters.telling import Teller
from tidegate.engine.link import Link
from tidegate.engine.weights.staging import Live, Staging
from tidegate.errors import WeightsRefused
from tidegate.transport.limits import cut
from tidegate.transport.messages import FinishWeightUpdate, WeightsFailed, WeightsLive


class WeightSwapper:
    """The copy here of what the engine computes with, and the way to change it."""

    def __init__(
        self,
        adapter: EngineAdapter,
        able: Capabilities,
        link: Link,
        *,
        staging: Staging,
        weights: HostWeights,
        directories: PublishedDirectories,
        label: str,
        label_of: Callable[[int], str],
    ) -> None:
        """``label`` is what the model directory's weights are called; ``label_of`` a version makes
        a name for others, another each time."""
        self._adapter = adapter
        self._able = able
        self._link = link
        self._staging = staging
        self._weights = weights
        self._is_copy_right = True
        """Whether ``_weights`` are those that the engine computes with."""
        self._directories = directories
        self._first_label = label
        self._label_of = label_of
        self.is_swapping = False
        self.has_swapped = False
        """Whether the engine was ever given others than the model directory's weights."""

    def live(self, version: int) -> Live | None:
        """What part of a set is laid over; None if nobody here knows what serves."""
        return Live(version, self._weights) if self._is_copy_right else None

    async def swap(
        self, update: FinishWeightUpdate, streams: Streams, scores: ScoreDesk, teller: Teller
    ) -> WeightsFailed | None:
        """Bring staged weights to the engine; requests under way as the update says.

        Says itself that they are live, for nothing may come in between; a failure is to be told.
        """
        self.is_swapping = True
        label = self._label_of(update.version)
        try:
            staged = self._staging.exchange(update.version, self._weights)
            assert isinstance(staged, HostWeights)
            self._weights, self._is_copy_right = staged, False
            self.has_swapped = True
            directory = None
            if not self._able.takes_tensors:
                directory = await asyncio.to_thread(self._directories.write, staged, label)
            scores.stop()
            begun_ns = time.monotonic_ns()
            recomputed = await self._quieten(update, streams)
            if directory is None:
                await self._adapter.load_tensors(staged.by_name, label)
            else:
                await self._adapter.load_weights(directory, label)
            await teller.all_told()  # tokens that were sampled before came until now
            teller.version, self._is_copy_right = update.version, True
            swapped_ns = time.monotonic_ns()
            self._link.send(
                WeightsLive(
                    version=update.version,
                    swapped_us=swapped_ns // 1000,
                    recomputed_turns=recomputed,
                    standstill_us=(swapped_ns - begun_ns) // 1000,
                )
            )
            await streams.new_weights(label)
        except (WeightsRefused, OSError) as error:
            self._directories.forget(label)
            return WeightsFailed(version=update.version, message=cut(str(error)))
        finally:
            self.is_swapping = False
        return None

    async def reload(self) -> None:
        """The model directory's weights once more, which the engine has forgotten."""
        assert not self.has_swapped, "the directory's weights are of the past"
        if self._able.takes_tensors:
            await self._adapter.load_tensors(self._weights.by_name, self._first_label)
        else:
            await self._adapter.load_weights(self._directories.model, self._first_label)

    async def _quieten(self, update: FinishWeightUpdate, streams: Streams) -> int:
        """Pause as the update says; how many turns are to be asked for again."""
        if update.kv_policy == "keep" and update.pause_mode != "abort" and self._able.keeps_kv:
            await streams.freeze()
            await streams.cut_unbegun()
            return 0
        return await streams.stop(are_over=update.pause_mode == "abort")
