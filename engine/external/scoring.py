"""Scoring requests to an external engine: sent while the engine runs, restarted after each pause.

All values of an answer are of one weight version, because no request outlasts a pause.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from tidegate.engine.external.adapter import (
    EngineAdapter,
    ExternalScores,
    ScoreRequest,
    TopLogprobs,
    adapter_failed,
)
from tidegate.engine.link import OrchestratorLink
from tidegate.errors import EngineGone, ScoreRefused, TidegateError
from tidegate.transport import scoring
from tidegate.transport.limits import cut
from tidegate.transport.scoring import PART_BYTES_MAX, ScoreResult, ScoreTokens


class ExternalScoreQueue:
    """Scoring requests that have not been answered."""

    def __init__(
        self,
        adapter: EngineAdapter,
        link: OrchestratorLink,
        *,
        on_gone: Callable[[TidegateError], None],
    ) -> None:
        """``on_gone`` is called if the engine is gone; another engine then gets the requests."""
        self._adapter = adapter
        self._capabilities = adapter.capabilities
        self._on_gone = on_gone
        self._link = link
        self._pending: dict[int, ScoreTokens] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def submit(self, message: ScoreTokens) -> None:
        """Add a request; the next :meth:`start` sends it."""
        if message.score_kind in self._capabilities.scores and not message.adapter:
            self._pending[message.request_id] = message
            return
        what = f"{message.score_kind} with adapters" if message.adapter else message.score_kind
        self._refuse(message.request_id, f"{self._capabilities.engine} does not score {what}")

    def start(self, version: int) -> None:
        """Send the requests that are not in flight; the engine serves ``version``."""
        for request, message in self._pending.items():
            if request not in self._tasks:
                self._tasks[request] = asyncio.create_task(self._score(message, version))

    def stop(self) -> None:
        """Cancel requests in flight; the next :meth:`start` sends them again."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def cancel(self, request: int) -> None:
        """Drop a request."""
        self._pending.pop(request, None)
        if (task := self._tasks.pop(request, None)) is not None:
            task.cancel()

    def clear(self) -> None:
        """Drop all requests."""
        self.stop()
        self._pending.clear()

    async def _score(self, message: ScoreTokens, version: int) -> None:
        score_request = ScoreRequest(
            np.frombuffer(message.token_ids, "<i4").tolist(),
            message.score_kind,
            message.start,
            message.top_logprobs,
            message.temperature,
        )
        try:
            scores = await self._adapter.score(score_request)
        except ScoreRefused as error:
            self._refuse(message.request_id, str(error))
        except EngineGone as error:
            self._on_gone(error)
        except Exception as error:  # noqa: BLE001 - report defects, too
            self._on_gone(adapter_failed(error))
        else:
            self._answer(message, version, scores)
        self._pending.pop(message.request_id, None)
        self._tasks.pop(message.request_id, None)

    def _answer(self, message: ScoreTokens, version: int, scores: ExternalScores) -> None:
        k, top_logprobs = message.top_logprobs, scores.top or TopLogprobs([], [])
        rows = len(scores.logprobs)
        part = max(1, PART_BYTES_MAX // (4 + 8 * k))
        values = np.array(scores.values, "<f4").tobytes()
        for first in range(0, max(1, rows), part):
            positions = slice(first, first + part)
            top = slice(first * k, (first + part) * k)
            self._link.send(
                ScoreResult(
                    request_id=message.request_id,
                    version=version,
                    start=message.start + first,
                    logprobs=np.array(scores.logprobs[positions], "<f4").tobytes(),
                    top_ids=np.array(top_logprobs.token_ids[top], "<i4").tobytes(),
                    top_logprobs=np.array(top_logprobs.logprobs[top], "<f4").tobytes(),
                    values=values,
                    is_last=first + part >= rows,
                )
            )

    def _refuse(self, request: int, error: str) -> None:
        self._link.send(scoring.ScoreFailed(request_id=request, message=cut(error)))
