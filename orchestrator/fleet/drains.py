"""Engines that leave a run on request: their turns end or are moved, then the engine ends.

:class:`EngineSide` owns one :class:`Drains`. A draining engine has left weight control, adapters
and scoring, so no publish, pause or sleep waits for it. It gets no more turns (``EngineDraining``).
When its time is up, ``HAND_BACK`` makes it hand back its turns with all their tokens, which
continue on other engines; then it is sent ``Shutdown``. Time is up at once if weights that it will
not serve are released, or if engines pause.
"""

import asyncio
import logging
from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.fleet.pending_futures import PendingFutures, resolve
from tidegate.orchestrator.fleet.shell import EngineShell, RunShell
from tidegate.transport.messages import HAND_BACK, FromEngine, Shutdown, TurnsPaused

log = logging.getLogger("tidegate")


@dataclass(slots=True, eq=False)
class _Drain:
    """One engine that drains."""

    left: "asyncio.Future[int]"
    """Resolved once the engine has left, with the number of its turns that were moved."""
    timer: asyncio.TimerHandle | None = None
    """Ends the engine's time; later, the wait for its answer."""
    is_time_up: bool = False
    """Whether the engine was sent ``HAND_BACK`` to hand back its turns."""
    moved_turns: int = 0

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


class Drains:
    """All draining engines of a run."""

    def __init__(
        self,
        fleet: Fleet,
        pending: PendingFutures,
        run: RunShell,
        engines: EngineShell,
        *,
        answer_timeout_s: float,
    ) -> None:
        """``answer_timeout_s``: time for an engine to hand back its turns; then they are moved
        with the tokens received so far."""
        self._fleet = fleet
        self._pending = pending
        self._run, self._engines = run, engines
        self._answer_timeout_s = answer_timeout_s
        self._drains: dict[str, _Drain] = {}

    def __contains__(self, engine: str) -> bool:
        return engine in self._drains

    async def drain(self, engine: str, within_s: float) -> int:
        """Have an engine leave; return the number of its turns that were moved.

        A cancelled call leaves the engine draining. If it drains already, the earlier deadline
        counts.

        Raises:
            ConfigError: there is no such engine.
        """
        return await asyncio.shield(self.begin(engine, within_s))

    def begin(self, engine: str, within_s: float) -> "asyncio.Future[int]":
        """Begin to drain an engine; the future is done once it has left.

        Raises:
            ConfigError: there is no such engine.
        """
        if (drain := self._drains.get(engine)) is None:
            drain = self._begin(engine, within_s)
        self.check()
        if within_s <= 0 or self._must_hurry(engine):
            self._end_time(engine)
        else:
            self._shorten(engine, within_s)
        return drain.left

    def _begin(self, engine: str, within_s: float) -> _Drain:
        record = self._fleet.engines.get(engine)
        if record is None:
            raise ConfigError(_unknown_message(engine, self._fleet))
        loop = asyncio.get_running_loop()
        drain = self._drains[engine] = _Drain(loop.create_future())
        self._pending.others.add(drain.left)
        drain.left.add_done_callback(self._pending.others.discard)
        record.is_draining = True
        self._fleet.retire(engine)
        self._engines.exclude(engine)
        self._run.handle(ev.EngineDraining(engine))
        turns = self._run.core.turns.engines
        others = [name for name, each in turns.items() if not each.is_draining]
        log.info(
            "engine=%s drains turns=%d within_s=%g engines_left=%d",
            engine,
            len(turns[engine].submissions) if engine in turns else 0,
            within_s,
            len(others),
        )
        if not others:
            log.warning(
                "engine=%s is the last that takes turns: turns wait until another engine joins",
                engine,
            )
        return drain

    def _must_hurry(self, engine: str) -> bool:
        """Whether an engine must not sample on: engines pause, or it lacks released weights."""
        record = self._fleet.engines.get(engine)
        is_old = record is not None and record.weight_version < self._run.core.trainer_version
        return self._engines.is_pausing or (is_old and not self._is_for_evaluation(engine))

    def _is_for_evaluation(self, engine: str) -> bool:
        """Whether an engine is kept for evaluations, which no release of weights concerns."""
        turns = self._run.core.turns.engines.get(engine)
        return turns is not None and turns.is_for_evaluation

    def _shorten(self, engine: str, within_s: float) -> None:
        """End an engine's time after ``within_s``, unless it ends sooner."""
        loop, drain = asyncio.get_running_loop(), self._drains.get(engine)
        if drain is None or drain.is_time_up:
            return
        if drain.timer is None or drain.timer.when() > loop.time() + within_s:
            drain.set_timer(loop.call_later(within_s, self._end_time, engine))

    # ------------------------------------------------------------ what happens meanwhile

    def hurry(self) -> None:
        """End the time of all draining engines, because engines pause."""
        for engine in list(self._drains):
            self._end_time(engine)

    def released(self) -> None:
        """End the time of draining engines that sample for training: weights were released."""
        for engine in list(self._drains):
            if not self._is_for_evaluation(engine):
                self._end_time(engine)

    def cut(self) -> None:
        """Have all draining engines leave now, before they sample another token."""
        for engine in list(self._drains):
            self._leave(engine)

    async def wait_left(self) -> None:
        """Return once no engine drains any more."""
        await self._pending.until(lambda: not self._drains)

    def check(self) -> None:
        """Have engines leave that have no turns left."""
        for engine in list(self._drains):
            turns = self._run.core.turns.engines.get(engine)
            if turns is None or not turns.submissions:
                self._leave(engine)

    def received(self, engine: str, message: FromEngine) -> None:
        """Handle a control message of a draining engine."""
        drain = self._drains[engine]
        is_abort = isinstance(message, TurnsPaused) and message.mode == HAND_BACK.mode
        if is_abort and drain.is_time_up:
            self._leave(engine)  # turns that it had not begun are moved, too

    def joined(self, engine: str) -> None:
        """Handle a draining engine that has reconnected, and has forgotten its pause."""
        if engine not in self._drains:  # it drained when the run was resumed
            self._begin(engine, 0.0)
            self._end_time(engine)
        elif self._drains[engine].is_time_up:
            self._engines.send([(engine, HAND_BACK)])

    def left(self, engine: str) -> None:
        """Handle an engine that is gone."""
        drain = self._drains.pop(engine, None)
        if drain is None:
            return
        drain.set_timer(None)
        resolve(drain.left, drain.moved_turns)
        self._pending.notify()

    def close(self) -> None:
        """Stop all timers; no call may follow."""
        for drain in self._drains.values():
            drain.set_timer(None)

    # ------------------------------------------------------------ the end

    def _end_time(self, engine: str) -> None:
        """Have an engine hand back its turns."""
        drain = self._drains.get(engine)
        if drain is None or drain.is_time_up:
            return
        drain.is_time_up = True
        turns = self._run.core.turns.engines.get(engine)
        drain.moved_turns = len(turns.submissions) if turns is not None else 0
        loop = asyncio.get_running_loop()
        drain.set_timer(loop.call_later(self._answer_timeout_s, self._give_up, engine))
        self._engines.send([(engine, HAND_BACK)])

    def _give_up(self, engine: str) -> None:
        log.warning("engine=%s has not handed back its turns in time", engine)
        self._leave(engine)

    def _leave(self, engine: str) -> None:
        """Remove an engine, move the turns that it still has, and have it end."""
        drain = self._drains.get(engine)
        if drain is None:
            return
        gone = self._fleet.lose(engine, f"drained; {drain.moved_turns} turns moved", is_crash=False)
        for event in gone:
            self._run.handle(event)
        self._engines.send([(engine, Shutdown())])


def _unknown_message(engine: str, fleet: Fleet) -> str:
    names = ", ".join(sorted(fleet.engines)) or "none"
    if (why := fleet.departed.get(engine)) is not None:
        return f"engine {engine!r} has left ({why}); connected engines: {names}"
    return f"no engine is named {engine!r}; connected engines: {names}"
