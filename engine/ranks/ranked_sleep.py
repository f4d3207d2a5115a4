"""How does an engine of several ranks sleep? Every rank gives its own memory back, or none does.

Each has a :class:`~tidegate.engine.execution.sleep.Sleeper` of its own; rank 0's alone knows turns.
While it waits for the others' word it beats, for copies to a disk take long.
"""

from collections.abc import Callable, Sequence

from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.sleep import Sleeper, Turns
from tidegate.engine.ranks.team import Team
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
    SleepFailed,
    Wake,
)


class Frozen:
    """What a rank other than 0 holds of turns: none, and it is told to sleep when none runs."""

    is_pause_asked = True
    is_pause_in_effect = True
    is_swap_asked = False

    def hold(self, is_held: bool) -> None:
        """Rank 0 tells no steps meanwhile."""

    def forget_kv(self) -> None:
        """Rank 0 does."""


class RankedSleeper(Sleeper):
    """Rank 0's own memory, and the others'."""

    def __init__(
        self,
        runner: Runner,
        staging: Staging,
        turns: Turns,
        *,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        team: Team,
    ) -> None:
        super().__init__(runner, staging, turns, reload=reload)
        self._team = team
        self._processes = team.ranks
        self._asleep_elsewhere: set[MemoryTag] = set()
        """What another rank could not wake, whether this one did or never slept."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """What sleeps now, on any rank."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep | self._asleep_elsewhere]

    def swapped(self) -> None:
        """Other weights were swapped in, on every rank."""
        self._asleep_elsewhere.discard("weights")
        super().swapped()

    def _sleep(self, asked: Sleep) -> Message:
        slept_before = self.asleep
        self._team.tell(rank.RankSleep(asked))
        mine = super()._sleep(asked)
        theirs = self._team.await_memory(self.beat)
        failed = _failures(mine, theirs)
        if not failed and isinstance(mine, Asleep):
            returned = mine.returned_bytes + sum(answer.returned_bytes for answer in theirs)
            return Asleep(request=asked.request, tags=mine.tags, returned_bytes=returned)
        # All or none: those that sleep, and did not before, wake again.
        tags = [tag for tag in asked.tags if tag not in slept_before]
        self._asleep_elsewhere.update(tags)  # on some, whatever this one did, unless all wake
        self.wake(Wake(request=asked.request, tags=tags))
        return SleepFailed(request=asked.request, message=cut(failed))

    def wake(self, message: Wake) -> Message:
        """Take memory again, on every rank.

        Where one can't, what is awake stays so, and what isn't is said to sleep: to ask again is
        to wake the rest.
        """
        tags = set(self.asleep).intersection(message.tags)
        self._team.tell(rank.RankWake(message))
        mine = super().wake(message)
        theirs = self._team.await_memory(self.beat)
        self.lacks_weights |= any(answer.lacks_weights for answer in theirs)
        failed = _failures(mine, theirs)
        if any(answer.failure for answer in theirs):
            self._asleep_elsewhere |= tags
        else:
            self._asleep_elsewhere -= tags
        self._hold()
        if failed:
            return SleepFailed(request=message.request, message=cut(failed))
        return Awake(request=message.request, tags=self.asleep, lacks_weights=self.lacks_weights)


def memory_answer(answer: Message) -> rank.RankMemory:
    """What rank 0 needs to know of another rank's answer to a sleep or a wake."""
    match answer:
        case Asleep(returned_bytes=returned):
            return rank.RankMemory(returned_bytes=returned)
        case Awake(lacks_weights=lacks):
            return rank.RankMemory(lacks_weights=lacks)
        case SleepFailed(message=why):
            return rank.RankMemory(failure=why or "failed")
    raise AssertionError(f"{type(answer).__name__} answers neither")


def _failures(mine: Message, theirs: Sequence[rank.RankMemory]) -> str:
    """Who could not, and why; empty if all could."""
    failed = [f"rank 0: {mine.message}"] if isinstance(mine, SleepFailed) else []
    failed += [f"rank {n}: {its.failure}" for n, its in enumerate(theirs, start=1) if its.failure]
    return "; ".join(failed)
