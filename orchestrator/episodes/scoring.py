"""How does an episode learn what a model makes of given tokens? It has engines score them.

Those of its own run, or of another. Nothing of it is a turn: no ledger counts it, no rollout has it
in its context, and an episode that is begun again after a crash asks again.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, cast

from tidegate.errors import RunClosed
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.activities import SCORE
from tidegate.orchestrator.episodes.generating import Generating
from tidegate.orchestrator.fleet.scores import (
    Asked,
    Readout,
    Score,
    TokenScores,
    ask_logprobs,
    ask_rewards,
)


class AsksScores(Protocol):
    """A run that can be asked from any event loop, such as a :class:`~tidegate.Scorer`."""

    async def ask_scores(self, asked: Sequence[Asked]) -> list[Score]:
        """An answer to each."""


class ScoringEpisode:
    """What of an episode has tokens scored, and knows when that is of no use any more."""

    __slots__ = ("_asking", "_generating", "_is_over", "_rollout")

    def __init__(self, rollout: Rollout, generating: Generating) -> None:
        self._rollout = rollout
        self._generating = generating
        self._is_over = False
        self._asking: tuple[asyncio.Future[list[Score]], ...] = ()
        """Not answered yet."""

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
        by: AsksScores | None = None,
    ) -> list[TokenScores]:
        """How likely the policy's live weights find each sequence's tokens from ``start`` on.

        As :meth:`tidegate.Rollouts.score`, while the episode goes on, and beside its turns too. The
        sequences are whole contexts: ``[episode.token_ids + answer for answer in answers]``.

        ``by``: the scorer to ask in place of the policy's engines, such as one of
        ``tidegate.score_server(model=reference)``, or its twin that is not async.

        Cancelled with the episode, or by ``asyncio.timeout``, engines are told.

        Raises:
            ScoreRefused: no engine can ever answer, e.g. a sequence is too long.
            EngineLost: several engines were lost with the same sequence, or the scorer's last one.
        """
        asked = ask_logprobs(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", await self._ask(asked, by))

    async def reward(
        self, sequences: Sequence[Any], *, by: AsksScores | None = None
    ) -> list[Readout]:
        """What a classification head says of each sequence; as :meth:`score` otherwise."""
        return cast("list[Readout]", await self._ask(ask_rewards(sequences), by))

    async def _ask(self, asked: Sequence[Asked], by: AsksScores | None) -> list[Score]:
        self._refuse_if_over()
        coming: Awaitable[list[Score]]
        if by is None:
            coming = self._generating.score(self._rollout, asked)
        else:
            coming = by.ask_scores(asked)
        asking = asyncio.ensure_future(coming)
        self._asking += (asking,)
        try:
            with self._generating.doing(self._rollout, SCORE):
                return await asking
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_over and task is not None and not task.cancelling():
                self._refuse_if_over()
            raise
        finally:
            asking.cancel()
            self._asking = tuple(other for other in self._asking if other is not asking)

    def _take_scores_back(self) -> None:
        """The episode is over: who has it ask in the background is told so."""
        for asking in self._asking:
            asking.cancel()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RunClosed("the episode has returned; its context is settled")
