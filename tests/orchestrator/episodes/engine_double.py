"""Engine double of episodes' tests: refuses whatever a test does not expect."""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from tidegate.orchestrator.core.rollout import Rollout, Turn


class QuietEngines:
    """An :class:`EpisodeBackend` but for `generate`; records cuts."""

    def __init__(self) -> None:
        self.cuts: list[tuple[int, int]] = []

    async def rejoin(self, rollout: Rollout) -> Turn:
        raise AssertionError("no turn is cut in the middle here")

    def subscribe(self, rollout: Rollout, event: object, turn: object) -> None:
        raise AssertionError("no test streams a turn here")

    def give_up_turn(self, rollout: Rollout) -> None:
        raise AssertionError("no test cancels a call here")

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        self.cuts.append((turns, tokens))

    def activity(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def context_tokens_max(self) -> int:
        """Return 0: unknown."""
        return 0

    def is_over_budget(self, rollout: Rollout) -> bool:
        return False

    async def park(self, rollout: Rollout) -> None:
        raise AssertionError("no test waits for newer weights here")

    async def score(self, rollout: Rollout, query: object) -> NoReturn:
        raise AssertionError("no test requests scores here")

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        raise AssertionError(f"no test forks here, but {reason}")
