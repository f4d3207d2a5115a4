"""Scoring requests of a simulated engine: it returns log-probs of given tokens after virtual time.

:mod:`engine` makes it. Log-probs are those of :mod:`model`. Open requests are dropped when the
engine's conversation with the orchestrator ends. An answer is computed by the weights that are live
when the answer is sent. A paused or sleeping engine answers no request until the engine resumes.
"""

import asyncio
from array import array
from collections.abc import Callable

from tidegate.simulation.checks.model import TurnModel
from tidegate.simulation.engine.spec import SimulatedEngineSpec
from tidegate.simulation.engine.turns import SimulatedTurns
from tidegate.transport.scoring import CancelScore, ScoreFailed, ScoreResult, ScoreTokens


class SimulatedScores:
    """Scoring requests of one engine."""

    def __init__(
        self,
        turns: SimulatedTurns,
        spec: SimulatedEngineSpec,
        model: TurnModel,
        *,
        loop: asyncio.AbstractEventLoop,
        on_computed: Callable[[], None],
    ) -> None:
        self._turns = turns
        self._spec = spec
        self._model = model
        self._loop = loop
        self._on_computed = on_computed
        self._requests: dict[int, tuple[float, ScoreTokens]] = {}
        """Open requests by number, each with the virtual time at which its answer is computed."""

    def take(self, message: ScoreTokens | CancelScore) -> None:
        """Begin to compute a request, in parallel with turns; or cancel a request."""
        if isinstance(message, CancelScore):
            self._requests.pop(message.request_id, None)
            return
        due_s = self._loop.time() + self._spec.busy_s(1, len(message.token_ids) // 4)
        self._requests[message.request_id] = (due_s, message)
        self._loop.call_at(due_s, self._on_computed)

    def clear(self) -> None:
        """Forget all open requests."""
        self._requests.clear()

    def take_replies(self) -> list[ScoreResult | ScoreFailed]:
        """Remove the requests that are computed, and return their answers."""
        if not self._requests or self._turns.pause_mode is not None or self._turns.is_held:
            return []
        now_s = self._loop.time()
        due = [message for due_s, message in self._requests.values() if due_s <= now_s]
        for message in due:
            del self._requests[message.request_id]
        return [self._reply(message) for message in due]

    def _reply(self, message: ScoreTokens) -> ScoreResult | ScoreFailed:
        tokens = array("i", message.token_ids)
        if message.score_kind != "logprobs" or message.top_logprobs:
            why = "a simulated engine computes only log-probs of the given tokens"
            return ScoreFailed(request_id=message.request_id, message=why)
        if not 1 <= message.start < len(tokens):
            why = f"start must be in [1, {len(tokens) - 1}], got {message.start}"
            return ScoreFailed(request_id=message.request_id, message=why)
        logprobs = self._model.logprobs(tokens, message.start, content=self._turns.content)
        return ScoreResult(
            request_id=message.request_id,
            version=self._turns.version,
            start=message.start,
            logprobs=array("f", logprobs).tobytes(),
        )
