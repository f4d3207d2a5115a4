"""Bugs in what episodes do beside taking turns; see :mod:`mutations`."""

import pytest

from tests.simulation.mutations import mutation
from tests.simulation.mutations_of_the_wire import MUTATIONS
from tidegate.orchestrator.episodes import episode, runner
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.scheduler.outbox import Outbox

__all__ = ["MUTATIONS"]


@mutation(seed=24)
def engines_with_old_weights_are_asked_for_scores(patch: pytest.MonkeyPatch) -> None:
    right = ScoreDispatcher._choose

    def choose(self: ScoreDispatcher, want: str) -> str | None:
        live_version, self._live_version = self._live_version, lambda: 0
        try:
            return right(self, want)
        finally:
            self._live_version = live_version

    patch.setattr(ScoreDispatcher, "_choose", choose)


@mutation(seed=9)
def a_branch_begins_a_token_short(patch: pytest.MonkeyPatch) -> None:
    def fork(self: Episode) -> Episode:
        return self.branch(self.token_ids[:-1] or self.token_ids, "asked", media=self.media)

    patch.setattr(Episode, "fork", fork)


@mutation(seed=0)
def a_turn_that_no_frame_holds_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(episode, "CONTEXT_TOKENS_MAX", 1 << 31)
    patch.setattr(runner, "refuse_too_large", lambda *_: None)
    patch.setattr(Outbox, "_send_or_refuse", lambda self, *sent: self._send(*sent))
