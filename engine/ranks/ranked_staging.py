"""When are new weights complete on an engine of several ranks? Once each rank has staged its part.

It knows nothing of turns. Every rank copies for itself, from the channel that the orchestrator
names, and takes what is its own. Should one refuse a version, all do: it is never said to be
staged. And all swap between the same two steps, for a rank hears of swaps and steps in one order.
"""

from collections.abc import Callable

from tidegate.engine.ranks.team import Team
from tidegate.engine.weights.staging import Live, Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.transport import rank_messages as rank
from tidegate.transport.messages import (
    InitWeights,
    Message,
    StartWeightUpdate,
    UpdateWeights,
    WeightsStaged,
)
from tidegate.transport.weight_channels import NOWHERE, Home


class RankedStaging(Staging):
    """Rank 0's own, and the word of the others."""

    def __init__(
        self, allocate: Callable[[], WeightStore], team: Team, home: Home = NOWHERE
    ) -> None:
        super().__init__(allocate, home)
        self._team = team
        self._attempt = 0
        """How many updates were started: answers to older ones are no news."""
        self._unstaged: set[int] = set()
        """Ranks that have not said yet that the update under way is complete."""
        self._staged: WeightsStaged | None = None
        """Rank 0's own word, as long as others are waited for."""

    @property
    def is_busy(self) -> bool:
        """Whether an answer may be due any moment."""
        return super().is_busy or self._staged is not None

    def init(self, message: InitWeights) -> None:
        """Phase 1, on every rank."""
        self._team.tell(rank.Relay(message))
        super().init(message)

    def start(self, message: StartWeightUpdate, live: Live | None = None) -> None:
        """Phase 2, on every rank."""
        self._attempt += 1
        self._unstaged = set(range(1, self._team.ranks))
        self._staged = None
        version = None if live is None else live.version
        self._team.tell(rank.Relay(message, self._attempt, version))
        super().start(message, live)

    def update(self, message: UpdateWeights) -> None:
        """Phase 3, on every rank."""
        self._team.tell(rank.Relay(message))
        super().update(message)

    def abandon(self) -> None:
        """Forget the update that is under way or complete, on every rank."""
        self._team.tell(rank.Abandon())
        self._unstaged.clear()
        self._staged = None
        super().abandon()

    def give_up(self, why: str) -> bool:
        """Stop what is under way on every rank; whether nothing is any more on this one."""
        self._team.tell(rank.Abandon(why))
        self._unstaged.clear()
        self._staged = None
        return super().give_up(why)

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete on every rank."""
        return super().is_staged(version) and not self._unstaged and self._staged is None

    def take_answers(self) -> list[Message]:
        """What has been staged on every rank, or has failed on one, since the last call.

        Raises:
            RankLost: a rank is gone.
        """
        for number, answer in self._team.heard():
            if answer.attempt != self._attempt:
                continue
            self._unstaged.discard(number)
            if answer.refusal:
                self._refuse(f"rank {number}: {answer.refusal}")
        answers: list[Message] = []
        for message in super().take_answers():
            if isinstance(message, WeightsStaged):
                self._staged = message
            else:
                answers.append(message)
        if self._staged is not None and not self._unstaged:
            answers.append(self._staged)
            self._staged = None
        return answers

    def exchange(self, version: int, live: WeightStore) -> WeightStore:
        """Hand out rank 0's part of ``version``, and have the others take theirs."""
        staged = super().exchange(version, live)
        self._team.tell(rank.SwapWeights(version))
        return staged

    def _refuse(self, why: str) -> None:
        """Another rank has refused the update under way."""
        if self._update is not None and not self._update.is_over:
            self._fail(self._update, why)
        self._staged = None
