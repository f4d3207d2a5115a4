"""How does a caller wait for a run, and have it score? For async code, and for sync.

What a trainer does with its run besides is :mod:`tidegate.orchestrator.serve`'s; nothing here
decides anything.
"""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from tidegate.orchestrator.client import RunClient
from tidegate.orchestrator.config import run_settings
from tidegate.orchestrator.fleet.scores import (
    Asked,
    Pooling,
    Readout,
    Score,
    TokenScores,
    ask_embeddings,
    ask_logprobs,
    ask_rewards,
)
from tidegate.orchestrator.scheduler import Scheduler

Result = TypeVar("Result")

Work = Callable[[Scheduler], Awaitable[Result]]
"""Something to be done on the run's own loop."""


class Face(RunClient):
    """What both have: whatever a trainer is, code on some event loop may have its run score."""

    async def ask_scores(self, asked: Sequence[Asked]) -> list[Score]:
        """Answers to questions that are put already, of any kind, whichever loop this runs on."""
        return await self._awaited(_score(asked))

    async def _awaited(self, work: Work[Result]) -> Result:
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise self._running.failure() from None
            raise


class AsyncFace(Face):
    """A run, for async code. Use it in ``async with``."""

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wrap_future(self._start())
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> list[TokenScores]:
        """How likely the engines' weights find the tokens of each sequence from ``start`` on.

        A sequence is a list, array or tensor of token ids, without padding; ``start`` one position
        for all or one for each, at least 1. Log-probs are raw: before every sampling option but
        ``temperature``. Each sequence's are all of one version, which it names; while weights are
        swapped, sequences may differ in that. Paused engines answer once they go on. Nothing of it
        is trained on, counted or journalled.

        Raises:
            ScoreRefused: no engine can ever answer, e.g. a sequence is too long.
            EngineLost: no engine is left, or several were lost with the same sequence.
        """
        asked = ask_logprobs(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", await self.ask_scores(asked))

    async def embed(
        self,
        sequences: Sequence[Any],
        *,
        pooling: Pooling = "last",
        start: int | Sequence[int] = 0,
    ) -> list[Readout]:
        """Each sequence's normed last hidden state: of its last token, the mean, or all (``none``).

        ``start`` is the first position that ``mean`` and ``none`` take. As :meth:`score` otherwise.
        """
        asked = ask_embeddings(sequences, pooling, start)
        return cast("list[Readout]", await self.ask_scores(asked))

    async def reward(self, sequences: Sequence[Any]) -> list[Readout]:
        """What a model's classification head says of each sequence; as :meth:`score` otherwise."""
        return cast("list[Readout]", await self.ask_scores(ask_rewards(sequences)))

    async def _do(self, work: Work[Result]) -> Result:
        return await self._awaited(work)


class SyncFace(Face):
    """The same, for code that is not async. Use it in ``with``."""

    def __enter__(self) -> Self:
        try:
            self._start().result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> list[TokenScores]:
        """As :meth:`AsyncFace.score`."""
        asked = ask_logprobs(sequences, start, top_logprobs, temperature)
        return cast("list[TokenScores]", self._do(_score(asked)))

    def embed(
        self,
        sequences: Sequence[Any],
        *,
        pooling: Pooling = "last",
        start: int | Sequence[int] = 0,
    ) -> list[Readout]:
        """As :meth:`AsyncFace.embed`."""
        asked = ask_embeddings(sequences, pooling, start)
        return cast("list[Readout]", self._do(_score(asked)))

    def reward(self, sequences: Sequence[Any]) -> list[Readout]:
        """As :meth:`AsyncFace.reward`."""
        return cast("list[Readout]", self._do(_score(ask_rewards(sequences))))

    def _do(self, work: Work[Result]) -> Result:
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the run's loop has ended under it
            raise self._running.failure() from None


class Scorer(AsyncFace):
    """Engines that score and do nothing else, such as a frozen reference or reward model's."""


class SyncScorer(SyncFace):
    """The same for code that is not async."""


def score_server(**settings: Any) -> Scorer:
    """Serve a model to score by: a frozen reference, or one with a classification head.

        async with tidegate.score_server(model=path, engines=1) as reference:
            scores = await reference.score(sequences)

    It is a run without episodes, beside that of the policy; ``settings`` are those of
    :class:`~tidegate.RunSettings`, of which ``model``, ``engines``, ``dtype`` and
    ``threads_per_engine`` matter most.

    Raises:
        ConfigError: a setting is unknown, out of range or impossible.
    """
    return Scorer(run_settings(**settings))


def score_server_sync(**settings: Any) -> SyncScorer:
    """As :func:`score_server`, for code that is not async."""
    return SyncScorer(run_settings(**settings))


def _score(asked: Sequence[Asked]) -> Work[list[Score]]:
    async def work(scheduler: Scheduler) -> list[Score]:
        return await scheduler.scores.ask_all(asked)

    return work
