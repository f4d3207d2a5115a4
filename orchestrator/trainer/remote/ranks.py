"""Registry of a remote trainer's ranks, and a barrier at which their requests wait for each other.

The listener reports each rank's messages and departure to :class:`RankRegistry`. `service.py` has
requests wait at :class:`Barrier`, as in ``torch.distributed``; its error names the lost ranks.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import ConfigError, TrainerLost

TAKEOVER_SILENCE_S = 5.0
"""Silence after which another process may take over a rank: five heartbeats. The silent process
has most likely died; if it sends a message again, the run answers that it has lost the rank."""

WORLD_SIZE_MAX = 4096
"""Largest number of ranks of one trainer."""


class RankTaken(Exception):
    """A living process holds the rank. The trainer may ask again later."""


@dataclass(slots=True)
class RankProcess:
    """The process that holds a rank."""

    peer: bytes
    rank: int
    last_message_s: float
    """Event-loop time of the process's last message."""


class RankRegistry:
    """Processes that hold a trainer's ranks. The world size may change once all are gone."""

    def __init__(self) -> None:
        self.world_size = 0
        """Number of ranks; 0 before the first has joined."""
        self._ranks: dict[int, RankProcess] = {}
        self._left: dict[int, bool] = {}
        """Whether each rank that has left was done."""

    def join(self, peer: bytes, rank: int, world_size: int, now_s: float) -> bool:
        """Assign ``rank`` to this process; return whether a new trainer begins with it.

        Raises:
            ConfigError: the rank is outside of the world size.
            RankTaken: a living process holds it, or ranks of another world size are still
                connected.
        """
        if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise ConfigError(
                f"rank must be in [0, world_size), and world_size at most {WORLD_SIZE_MAX}; got "
                f"rank={rank}, world_size={world_size}"
            )
        living = [p for p in self._ranks.values() if p.peer != peer and _is_alive(p, now_s)]
        if self.world_size not in (0, world_size) and living:
            raise RankTaken(
                f"rank {living[0].rank} of {self.world_size} is still connected, but this trainer "
                f"has world_size={world_size}; end the other ranks first"
            )
        held = next((process for process in living if process.rank == rank), None)
        if held is not None and world_size == self.world_size:
            raise RankTaken(
                f"rank {rank} of {world_size} is held by a process that sent a message "
                f"{now_s - held.last_message_s:.1f} s ago; end that process, or use another rank"
            )
        is_new = self.world_size != world_size or (not living and self.has_left_done)
        if is_new:
            self._ranks, self._left, self.world_size = {}, {}, world_size
        self._left.pop(rank, None)
        self._ranks[rank] = RankProcess(peer, rank, now_s)
        return is_new

    def message_received(self, peer: bytes, now_s: float) -> RankProcess | None:
        """Record the time of a process's message; return its entry, or None if it holds no rank."""
        for process in self._ranks.values():
            if process.peer == peer:
                process.last_message_s = now_s
                return process
        return None

    def leave(self, peer: bytes, *, is_done: bool) -> int | None:
        """Release the rank of a process that leaves; return the rank, or None if it held none."""
        for rank, process in list(self._ranks.items()):
            if process.peer == peer:
                del self._ranks[rank]
                self._left[rank] = is_done
                return rank
        return None

    @property
    def peers(self) -> list[bytes]:
        """Peers of all processes that hold a rank, silent ones included."""
        return [process.peer for process in self._ranks.values()]

    @property
    def has_left_done(self) -> bool:
        """Whether every rank has left, and was done."""
        return len(self._left) == self.world_size > 0 and all(self._left.values())

    def has_left(self, rank: int) -> bool:
        """Whether the rank's process has left."""
        return rank in self._left

    def is_done(self, rank: int) -> bool:
        """Whether the rank's process has left because it was done."""
        return self._left.get(rank, False)

    def silent_s(self, rank: int, now_s: float) -> float | None:
        """Return the seconds since the rank's last message; None if no process holds it."""
        process = self._ranks.get(rank)
        return None if process is None else now_s - process.last_message_s

    def has_message_within(self, now_s: float, within_s: float) -> bool:
        """Whether any rank sent a message in the last ``within_s`` seconds."""
        return any(now_s - process.last_message_s < within_s for process in self._ranks.values())


def _is_alive(process: RankProcess, now_s: float) -> bool:
    return now_s - process.last_message_s < TAKEOVER_SILENCE_S


# ---------------------------------------------------------------- waits

CHECK_INTERVAL_S = 0.5
"""Time between two checks of a waiting request for lost ranks."""

BARRIER_TIMEOUT_S = 1800.0
"""Longest wait for a live rank that does not arrive: the default of torch.distributed's Gloo."""


@dataclass(frozen=True, slots=True)
class TrainerTimeouts:
    """Times after which a trainer or one of its ranks counts as lost."""

    trainer_s: float
    """Longest wait for a trainer or rank that has not connected yet, or has to reconnect."""
    rank_s: float
    """Longest silence of a rank that is connected."""


class Barrier:
    """Barrier at which requests of ranks wait for requests of other ranks."""

    def __init__(self, ranks: RankRegistry, timeouts: TrainerTimeouts) -> None:
        self._ranks = ranks
        self._timeouts = timeouts
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Have every waiting request check its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(
        self, is_ready: Callable[[], bool], missing: Callable[[], list[int]], *, doing: str
    ) -> None:
        """Wait until ``is_ready()`` is true, checked after each :meth:`notify`.

        Every ``CHECK_INTERVAL_S``, the ranks that ``missing()`` returns are checked for being lost.
        ``doing`` names the waiting request in the error.

        Raises:
            TrainerLost: a missing rank has left, is silent, or takes longer than its timeout.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not is_ready():
            self._check(missing(), loop.time(), began_s, doing)
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _check(self, missing: list[int], now_s: float, began_s: float, doing: str) -> None:
        reasons: dict[str, list[int]] = {}
        for rank in missing:
            if why := self._why_lost(rank, now_s, now_s - began_s):
                reasons.setdefault(why, []).append(rank)
        for why, ranks in reasons.items():
            raise TrainerLost(ranks=ranks, world_size=self._ranks.world_size, doing=doing, why=why)

    def _why_lost(self, rank: int, now_s: float, waited_s: float) -> str | None:
        silent_s = self._ranks.silent_s(rank, now_s)
        if self._ranks.is_done(rank):
            return "was done and has left"
        if self._ranks.has_left(rank):
            return "has failed and left" if waited_s > self._timeouts.rank_s else None
        if silent_s is None:
            is_late = waited_s > self._timeouts.trainer_s
            return f"has not connected for {waited_s:.0f} s" if is_late else None
        if (
            min(silent_s, waited_s) > self._timeouts.rank_s
        ):  # waited_s: the rank may be reconnecting
            return f"has sent nothing for {silent_s:.0f} s"
        if waited_s > BARRIER_TIMEOUT_S:
            return f"is alive, but has not arrived for {waited_s:.0f} s"
        return None
