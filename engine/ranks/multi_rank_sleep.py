"""Sleep and wake of an engine with several ranks: all ranks release their memory, or none does.

Takes the place of ``SleepController`` on rank 0. Every rank has a
:class:`~tidegate.engine.execution.sleep.SleepController` of its own, and only rank 0's controls a
scheduler. Rank 0 sends heartbeats while it waits for the other ranks, because copies to disk take
long.
"""

from collections.abc import Callable, Sequence

from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.sleep import SchedulerControl, SleepController
from tidegate.engine.ranks.rank_processes import RankProcesses
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.transport import rank_messages as rank
from tidegate.transport.limits import cut
from tidegate.transport.messages import Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepRequestFailed,
    Wake,
)


class NullSchedulerControl:
    """Stand-in for the scheduler on ranks other than 0, which have no turns of their own."""

    is_pause_requested = True
    is_pause_in_effect = True
    is_swap_requested = False

    def hold(self, is_held: bool) -> None:
        """Do nothing: rank 0 sends no steps while memory sleeps."""

    def forget_kv(self) -> None:
        """Do nothing: rank 0 preempts the turns."""


class MultiRankSleepController(SleepController):
    """Puts the memory of all ranks to sleep and wakes it."""

    def __init__(
        self,
        runner: Runner,
        staging: Staging,
        turns: SchedulerControl,
        *,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        peers: RankProcesses,
    ) -> None:
        super().__init__(runner, staging, turns, reload=reload)
        self._peers = peers
        self._processes = peers.ranks
        self._asleep_on_peers: set[MemoryTag] = set()
        """Tags of memory that another rank could not wake; this rank's state may differ."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags of the memory that sleeps now on any rank."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep | self._asleep_on_peers]

    def swapped(self) -> None:
        """Record a weight swap on all ranks."""
        self._asleep_on_peers.discard("weights")
        super().swapped()

    def _sleep(self, request: Sleep) -> Message:
        slept_before = self.asleep
        self._peers.broadcast(rank.RankSleep(request))
        local_reply = super()._sleep(request)
        peer_replies = self._peers.await_memory(self.heartbeat)
        failed = _failures(local_reply, peer_replies)
        if not failed and isinstance(local_reply, Asleep):
            returned = local_reply.freed_bytes + sum(reply.freed_bytes for reply in peer_replies)
            return Asleep(
                request_id=request.request_id, tags=local_reply.tags, freed_bytes=returned
            )
        # All ranks or none: memory that did not sleep before is woken again.
        tags = [tag for tag in request.tags if tag not in slept_before]
        self._asleep_on_peers.update(tags)  # asleep on some rank, unless all wake
        self.wake(Wake(request_id=request.request_id, tags=tags))
        return SleepRequestFailed(request_id=request.request_id, message=cut(failed))

    def wake(self, message: Wake) -> Message:
        """Allocate the memory again on all ranks.

        If a rank fails, memory that is awake on all ranks stays awake. All other memory is reported
        as asleep, and another request wakes it.
        """
        tags = set(self.asleep).intersection(message.tags)
        self._peers.broadcast(rank.RankWake(message))
        local_reply = super().wake(message)
        peer_replies = self._peers.await_memory(self.heartbeat)
        self.needs_weights |= any(reply.needs_weights for reply in peer_replies)
        failed = _failures(local_reply, peer_replies)
        if any(reply.failure for reply in peer_replies):
            self._asleep_on_peers |= tags
        else:
            self._asleep_on_peers -= tags
        self._hold()
        if failed:
            return SleepRequestFailed(request_id=message.request_id, message=cut(failed))
        return Awake(
            request_id=message.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )


def memory_reply(reply: Message) -> rank.RankMemory:
    """Convert the reply of a rank's sleep controller to the message for rank 0."""
    match reply:
        case Asleep(freed_bytes=returned):
            return rank.RankMemory(freed_bytes=returned)
        case Awake(needs_weights=lacks):
            return rank.RankMemory(needs_weights=lacks)
        case SleepRequestFailed(message=why):
            return rank.RankMemory(failure=why or "failed")
    raise AssertionError(f"{type(reply).__name__} answers neither")


def _failures(local_reply: Message, peer_replies: Sequence[rank.RankMemory]) -> str:
    """Return which ranks failed, and why; empty if none did."""
    failed = (
        [f"rank 0: {local_reply.message}"] if isinstance(local_reply, SleepRequestFailed) else []
    )
    failed += [
        f"rank {rank_number}: {reply.failure}"
        for rank_number, reply in enumerate(peer_replies, start=1)
        if reply.failure
    ]
    return "; ".join(failed)
