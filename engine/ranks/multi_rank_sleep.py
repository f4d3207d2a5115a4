"""Sleep and wake of an engine with several ranks: all ranks release their memory, or none does.

Used instead of ``SleepController`` on rank 0; each rank has a
:class:`~tidegate.engine.execution.sleep.SleepController` of its own, and only rank 0's knows turns.
Rank 0 sends heartbeats while it waits for the others, because copies to disk take long."""

from collections.abc import Callable, Sequence

from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.sleep import SchedulerControl, SleepController
from tidegate.engine.ranks.team import RankProcesses
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

    is_pause_asked = True
    is_pause_in_effect = True
    is_swap_asked = False

    def hold(self, is_held: bool) -> None:
        """Do nothing: rank 0 sends no steps meanwhile."""

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
        team: RankProcesses,
    ) -> None:
        super().__init__(runner, staging, turns, reload=reload)
        self._team = team
        self._processes = team.ranks
        self._asleep_elsewhere: set[MemoryTag] = set()
        """Memory that another rank could not wake, whatever its state on this rank."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags of the memory that sleeps now on any rank."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep | self._asleep_elsewhere]

    def swapped(self) -> None:
        """Take note of a weight swap on all ranks."""
        self._asleep_elsewhere.discard("weights")
        super().swapped()

    def _sleep(self, asked: Sleep) -> Message:
        slept_before = self.asleep
        self._team.tell(rank.RankSleep(asked))
        mine = super()._sleep(asked)
        theirs = self._team.await_memory(self.beat)
        failed = _failures(mine, theirs)
        if not failed and isinstance(mine, Asleep):
            returned = mine.freed_bytes + sum(answer.freed_bytes for answer in theirs)
            return Asleep(request_id=asked.request_id, tags=mine.tags, freed_bytes=returned)
        # All or none: memory that sleeps and did not before is woken again.
        tags = [tag for tag in asked.tags if tag not in slept_before]
        self._asleep_elsewhere.update(tags)  # asleep on some rank, unless all wake
        self.wake(Wake(request_id=asked.request_id, tags=tags))
        return SleepRequestFailed(request_id=asked.request_id, message=cut(failed))

    def wake(self, message: Wake) -> Message:
        """Allocate the memory again on all ranks.

        If a rank fails, memory that is awake stays awake, and the rest is reported as asleep;
        another request wakes the rest.
        """
        tags = set(self.asleep).intersection(message.tags)
        self._team.tell(rank.RankWake(message))
        mine = super().wake(message)
        theirs = self._team.await_memory(self.beat)
        self.needs_weights |= any(answer.needs_weights for answer in theirs)
        failed = _failures(mine, theirs)
        if any(answer.failure for answer in theirs):
            self._asleep_elsewhere |= tags
        else:
            self._asleep_elsewhere -= tags
        self._hold()
        if failed:
            return SleepRequestFailed(request_id=message.request_id, message=cut(failed))
        return Awake(
            request_id=message.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )


def memory_answer(answer: Message) -> rank.RankMemory:
    """Convert a rank's sleep or wake answer to the message for rank 0."""
    match answer:
        case Asleep(freed_bytes=returned):
            return rank.RankMemory(freed_bytes=returned)
        case Awake(needs_weights=lacks):
            return rank.RankMemory(needs_weights=lacks)
        case SleepRequestFailed(message=why):
            return rank.RankMemory(failure=why or "failed")
    raise AssertionError(f"{type(answer).__name__} answers neither")


def _failures(mine: Message, theirs: Sequence[rank.RankMemory]) -> str:
    """Return which ranks failed, and why; empty if none did."""
    failed = [f"rank 0: {mine.message}"] if isinstance(mine, SleepRequestFailed) else []
    failed += [f"rank {n}: {its.failure}" for n, its in enumerate(theirs, start=1) if its.failure]
    return "; ".join(failed)
