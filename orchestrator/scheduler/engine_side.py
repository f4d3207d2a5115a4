"""Message exchange with engines: fleet, outbox, sessions, scoring and weight control of one run.

Dispatches engines' messages to these parts, and notifies each of them when an engine joins or
leaves.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from tidegate.errors import (
    BadFrame,
    ConfigError,
    EngineLost,
    EngineStartFailed,
    VersionUnavailable,
)
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.drains import Drains
from tidegate.orchestrator.fleet.fleet import EngineReply, Fleet
from tidegate.orchestrator.fleet.launcher import Engines
from tidegate.orchestrator.fleet.open_sessions import OpenSessions
from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.fleet.shell import RunShell
from tidegate.orchestrator.scheduler.outbox import Outbox
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.recorder import EngineStep, Recorder
from tidegate.orchestrator.telemetry.statistics import EngineStatistics
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter
from tidegate.orchestrator.weight_sync.adapters import AdapterManager
from tidegate.orchestrator.weight_sync.control import EngineControl
from tidegate.orchestrator.weight_sync.parts import ArchivedAdapter, WeightParts
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    AdapterLive,
    Hello,
    HelloRejected,
    InitWeights,
    Message,
    SubmitTurn,
    TurnsPaused,
    TurnsResumed,
    WeightsLive,
)
from tidegate.transport.scoring import ScoreFailed, ScoreResult, ScoreTokens

WARNINGS_MAX = 32
"""Number of distinct warnings of engines that are logged."""

log = logging.getLogger("tidegate")


class EngineSide:
    """Sends a run's messages to engines, and dispatches those that arrive."""

    def __init__(
        self,
        settings: RunSettings,
        init_weights: InitWeights,
        send: Callable[[bytes, Message], bool],
        pending: PendingFutures,
        recorder: Recorder | None,
        run: RunShell,
        *,
        weights_dtype: str = "",
    ) -> None:
        """``weights_dtype``: dtype of the model directory's weights; empty if unknown."""
        self._weights_dtype = weights_dtype
        self._settings = settings
        self._recorder = recorder
        self._run, self._core = run, run.core
        self.fleet = Fleet(
            settings.fleet,
            send,
            is_deterministic=bool(settings.engine.deterministic),
            quantization=settings.engine.quantization or "",
            kv_policy=settings.weights.kv_policy,
            weight_channel=init_weights.channel,
            newest_version=run.core.newest_version,
        )
        timeout_s = settings.fleet.engine_timeout_s
        self.drains = Drains(self.fleet, pending, run, self, answer_timeout_s=timeout_s)
        self.control = EngineControl(
            settings.weights,
            init_weights,
            pending,
            self.drains,
            run,
            self,
            pause_timeout_s=timeout_s,
        )
        self._pending = pending
        self.adapters = AdapterManager(
            init_weights.channel, self.control, run, archive=self._archive_adapter
        )
        self.outbox = Outbox(
            self.fleet.send,
            supports_submit_turns=self.fleet.supports_submit_turns,
            on_refused=self._refuse_unsendable,
            on_error=run.fail,
        )
        self.sessions = OpenSessions(self.outbox.post)
        self.scores = ScoreDispatcher(
            self.fleet.engines,
            pending=pending.scores,
            live_version=lambda: self._core.turns.live_version,
            post=self.outbox.post,
        )
        self.launched: Engines | None = None
        """Engines that this run has started; None: the run can start none."""
        self._pins: dict[str, int] = {}
        """Number of pinned evaluations, by engine that has them. It has left weight control."""
        self._warned: set[str] = set()
        """Warnings of engines that were logged."""
        self._lent: set[str] = set()
        """Pinned engines that return to training afterwards."""
        self._starting: dict[str, str | None] = {}
        """Engines that :meth:`scale` waits for, and why they have ended; None while they start."""
        self.on_silent: Callable[[str], None] = lambda engine: None
        """Called with the name of each engine that was removed because it did not reply."""

    async def watch(self) -> None:
        """Send heartbeats, and remove silent engines, until cancelled.

        Raises:
            EngineLost: the run had no engine for ``engine_start_timeout_s``.
        """
        loop, settings = asyncio.get_running_loop(), self._settings.fleet
        no_engine_since_s: float | None = None
        while True:
            now_s = loop.time()
            silent = self.fleet.tick(now_s)
            for event in silent:
                self._run.handle(event)
            for event in silent:
                if isinstance(event, ev.EngineLeft):
                    self.on_silent(event.engine)
            if self.fleet.engines:
                no_engine_since_s = None
            elif no_engine_since_s is None:
                no_engine_since_s = now_s
            elif now_s - no_engine_since_s > settings.engine_start_timeout_s:
                reasons = "; ".join(f"{name}: {why}" for name, why in self.fleet.departed.items())
                why = f"none has joined since ({reasons or 'none ever joined'})"
                raise EngineLost(f"no engine is left, and {why}")
            await asyncio.sleep(settings.heartbeat_interval_s)

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines, after all messages posted before."""
        self.outbox.send(outgoing)

    def _refuse_unsendable(
        self, engine: str, message: SubmitTurn | ScoreTokens, error: BadFrame
    ) -> None:
        """Fail a turn or scoring request that fits no frame, as if the engine had refused it."""
        if isinstance(message, ScoreTokens):
            refusal = ScoreFailed(request_id=message.request_id, message=str(error))
            self.scores.received(engine, refusal)
        else:
            self._run.handle(ev.TurnRejected(engine, message.turn, str(error)))

    # ------------------------------------------------------------ messages received

    def on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        """Handle the frames that have arrived; an unexpected error ends the run."""
        try:
            for item in self.fleet.receive(frames, asyncio.get_running_loop().time()):
                self._on_item(item)
            self.drains.check()
            if acks := self.fleet.take_acks():
                self._run.when_safe(lambda: self.fleet.acknowledge(acks))  # engines drop these
        except Exception as error:  # noqa: BLE001 - a bug ends the run, not only this callback
            self._run.fail(error)

    def _on_item(self, item: ev.Event | EngineReply) -> None:
        if isinstance(item, EngineReply):
            if item.engine in self.drains and not isinstance(item.message, WeightsLive):
                self.drains.received(item.engine, item.message)
            elif isinstance(item.message, ScoreResult | ScoreFailed):
                self.scores.received(item.engine, item.message)
            elif not self.control.receive(item.engine, item.message):
                log.warning("engine=%s sent an unexpected message: %s", item.engine, item.message)
            elif isinstance(item.message, TurnsPaused | TurnsResumed):
                self._record(item.engine, type(item.message).__name__.lower())
            return
        if type(item) is ev.EngineJoined and item.engine not in self.fleet.engines:
            return  # it said hello again, and an earlier message of the same read let it leave
        if self._pending.new_tokens and type(item) is ev.StepArrived:
            self._notify_streams(item)
        self._run.handle(item)
        if self._recorder is not None and isinstance(item, ev.StepArrived):
            self._recorder.engine_step(
                EngineStep(
                    item.engine,
                    item.started_us,
                    item.busy_us,
                    item.version,
                    len(item.turns),
                    len(item.prefills),
                )
            )

    def _notify_streams(self, step: ev.StepArrived) -> None:
        """Wake the streams of a step's turns. They run once this read's steps are handled."""
        engine = self._core.turns.engines.get(step.engine)
        for turn in map(engine.submissions.get, step.turns.tolist()) if engine else ():
            if turn is not None and turn.rollout_id in self._pending.new_tokens:
                self._pending.new_tokens[turn.rollout_id].set()

    def staged(self, engine: str, version: int) -> None:
        """Record that an engine holds new weights beside its live ones."""
        self._record(engine, "staged", version=version)

    def swapped(self, engine: str, message: WeightsLive) -> None:
        """Handle an engine that serves other weights from now on."""
        self._record(
            engine,
            "swap",
            at_us=message.swapped_us,
            version=message.version,
            stall_us=message.stall_us,
        )
        self._run.handle(ev.EngineSwapped(engine, message.version))
        self.scores.advance()

    def adapter_live(self, engine: str, message: AdapterLive) -> None:
        """Record that an engine serves an adapter's version from now on."""
        self._record(engine, "adapter_swap", at_us=message.swapped_us, version=message.version)
        if message.name in self._core.trained_adapters:
            self._run.handle(ev.AdapterServed(engine, message.name, message.version))

    def _archive_adapter(self, name: str, version: int, adapter: LoadedAdapter) -> None:
        """Add an adapter's version to the run's records, if there are any. Blocks."""
        if self._recorder is not None:
            # The base can't be published while engines hold the adapter, so that this stays true.
            base = self._core.trainer_version
            adapters = {name: ArchivedAdapter(version, adapter.scale)}
            parts = WeightParts(over=base, is_adapter=True, adapters=adapters)
            self._recorder.adapter_weights(name, version, adapter.tensors, parts)

    def _hello_of(self, engine: str) -> Hello | None:
        record = self.fleet.engines.get(engine)
        return record.hello if record is not None else None

    # ------------------------------------------------------------ membership

    def membership_changed(self, event: ev.EngineJoined | ev.EngineLeft) -> None:
        """Notify weight control, scoring and sessions that an engine joined or left."""
        engine = event.engine
        if isinstance(event, ev.EngineJoined):
            self._check_dtype(engine)
            self._show_warnings(engine)
            self._pending.notify()
            known = self._core.turns.engines.get(engine)
            if known is not None and known.is_draining and known.epoch == event.epoch:
                self.drains.joined(engine)
                return
            if engine in self._pins and known is not None and known.epoch == event.epoch:
                return  # it has reconnected
            self._pins.pop(engine, None)
            self._lent.discard(engine)
            hello = self._hello_of(engine)
            self.control.joined(engine, event.weight_version, hello)
            self.scores.joined(engine)
            self.sessions.joined(engine, hello)
            return
        is_retired = self.fleet.is_retired(engine)
        if self.launched is not None and engine not in self.fleet.engines:
            (self.launched.retire if is_retired else self.launched.lost)(engine)
        level, what = (logging.INFO, "left") if is_retired else (logging.WARNING, "lost")
        log.log(level, "engine=%s %s: %s", engine, what, self.fleet.departed.get(engine))
        self._pins.pop(engine, None)
        self._lent.discard(engine)
        self.control.left(engine)
        self.scores.left(engine)
        self.sessions.left(engine)
        self.drains.left(engine)
        self._record(engine, what)

    def _check_dtype(self, engine: str) -> None:
        """Record an engine's compute dtype; warn if it is not the expected one."""
        hello = self._hello_of(engine)
        if hello is None:
            return
        if self._recorder is not None:
            self._recorder.engine_dtype(engine, hello.dtype)
        setting = self._settings.engine.dtype
        expected = self._weights_dtype if setting == "auto" else setting
        if hello.dtype and expected and hello.dtype != expected:
            log.warning(
                "engine=%s dtype=%s weights_dtype=%s: the engine computes in another precision, so "
                "its log-probs differ from the trainer's; start it with --dtype %s",
                engine,
                hello.dtype,
                expected,
                expected,
            )

    def _show_warnings(self, engine: str) -> None:
        """Log what an engine warns of, each text once: engines of one model mostly warn alike."""
        hello = self._hello_of(engine)
        for text in () if hello is None else hello.warnings:
            if text not in self._warned and len(self._warned) < WARNINGS_MAX:
                self._warned.add(text)
                log.warning("engine=%s %s", engine, cut(text))

    # ------------------------------------------------------------ engines kept for evaluations

    def keep_for_evaluation(self) -> None:
        """Keep as many engines for evaluations as the settings say, newest first; leave at least
        one for training."""
        here = {n: e for n, e in self._core.turns.engines.items() if not e.is_draining}
        kept = sum(engine.is_for_evaluation for engine in here.values())
        training = [n for n, e in here.items() if not (e.is_for_evaluation or e.is_away)]
        while kept < self._settings.fleet.evaluation_engines and len(training) > 1:
            self._run.handle(ev.EvaluationEngineChosen(training.pop(), True))
            kept += 1
        self._pending.notify()  # an evaluation may wait for the engine

    async def pin(self, version: int) -> list[str]:
        """Keep engines at ``version`` until :meth:`unpin`, while others take newer ones.

        Pins the engines kept for evaluations that serve the version. If the settings keep none, it
        pins one training engine. Waits until a version being published is served.

        Raises:
            VersionUnavailable: no such engine serves the version any more.
        """
        await self._pending.until(
            lambda: bool(self._pinnable(version)) or not self._may_come(version)
        )
        names = self._pinnable(version)
        if not names:
            raise VersionUnavailable(version, sorted(self._versions_served()))
        for name in names:
            if not self._pins.get(name):
                self.control.left(name, keeps_adapters=True)
                if not self._core.turns.engines[name].is_for_evaluation:
                    self._lent.add(name)
                    self._run.handle(ev.EvaluationEngineChosen(name, True))
            self._pins[name] = self._pins.get(name, 0) + 1
        return names

    def unpin(self, names: Iterable[str]) -> None:
        """Let engines take the newest version again, unless another evaluation has them pinned."""
        for name in names:
            if name not in self._pins:
                continue  # it has left
            self._pins[name] -= 1
            if self._pins[name]:
                continue
            del self._pins[name]
            engine = self._core.turns.engines.get(name)
            if engine is None or engine.is_draining:
                continue
            hello = self._hello_of(name)
            self.control.joined(name, engine.weight_version, hello, kept_adapters=True)
            if name in self._lent:
                self._lent.discard(name)
                self._run.handle(ev.EvaluationEngineChosen(name, False))
        self._pending.notify()

    def _pinnable(self, version: int) -> list[str]:
        """Return the engines that may be pinned to ``version`` now."""
        turns, has_own = self._core.turns.engines, self._settings.fleet.evaluation_engines > 0
        able = [
            name
            for name, engine in turns.items()
            if engine.weight_version == version
            and not (engine.is_away or engine.is_draining)
            and (name in self._pins or self.control.state.may_leave(name))
            and (engine.is_for_evaluation or not has_own)
        ]
        if has_own:
            return able
        if pinned := [name for name in able if name in self._pins]:
            return pinned
        training = sum(not (e.is_for_evaluation or e.is_draining) for e in turns.values())
        able.sort(key=lambda name: len(turns[name].submissions))
        return able[:1] if training > 1 else []

    def _may_come(self, version: int) -> bool:
        """Whether an engine may be pinned to ``version`` later: it is the newest, or newer."""
        staging = self.control.state.weights.staging_version
        if version < self._core.trainer_version or not self._kept_or_spare():
            return False
        return version == self._core.trainer_version or (staging is not None and staging >= version)

    def _kept_or_spare(self) -> bool:
        """Whether the run has engines for evaluations: kept ones, or more than one for training."""
        return self._settings.fleet.evaluation_engines > 0 or len(self._core.turns.engines) > 1

    def _versions_served(self) -> set[int]:
        turns = self._core.turns.engines
        has_own = self._settings.fleet.evaluation_engines > 0
        return (
            {e.weight_version for e in turns.values() if e.is_for_evaluation or not has_own}
            if self._kept_or_spare()
            else set()
        )

    def exclude(self, engine: str) -> None:
        """Leave a draining engine out of weight updates, pauses, sleep, adapters and scoring."""
        self.control.left(engine)
        self.scores.joined(engine)  # its requests are sent to others, and count no loss
        self._record(engine, "draining")

    @property
    def is_pausing(self) -> bool:
        """Whether engines are paused, or about to be."""
        return self.control.state.pauses.is_pausing

    def refuse_engine(self, engine: str, why: str) -> None:
        """Remove an engine that refused weights that other engines serve, and send it the
        reason."""
        self.fleet.send(engine, HelloRejected(message=why))
        self._lose(engine, f"could not take weights: {why}", is_crash=False)

    def training_statistics(self) -> list[EngineStatistics]:
        """Return statistics of the engines that get turns of training."""
        turns = dict(self._core.turns.engines)  # at once: engines come and go meanwhile
        return [
            each
            for each in self.fleet.statistics()
            if each.state == "serving"
            and not (each.name in turns and turns[each.name].is_for_evaluation)
        ]

    @property
    def reserved(self) -> int:
        """Number of engines that are kept for evaluations once enough have joined."""
        return self._settings.fleet.evaluation_engines

    async def scale(self, engines: int, within_s: float) -> None:
        """Start engines, or have some leave, until ``engines`` of the run's model run here.

        Return once the new ones have joined, or the others have left. The ones with the highest
        numbers leave, as by :meth:`Drains.drain`, those kept for evaluations last.

        Raises:
            ConfigError: this run starts no engines.
            EngineStartFailed: a new engine ended, or did not join in time. The others stay.
        """
        launched = self.launched
        if launched is None:
            raise ConfigError("this run starts no engines itself; start or drain them one by one")
        turns = self._core.turns.engines
        kept = {name for name, engine in turns.items() if engine.is_for_evaluation}
        names = sorted(launched.names, key=lambda name: name not in kept)
        if leaving := names[engines:]:
            for name in leaving:
                if name not in self.fleet.engines:  # it starts, or waits for its restart
                    launched.retire(name)
                    launched.kill(name)
            drains = [self.drains.begin(n, within_s) for n in leaving if n in self.fleet.engines]
            await asyncio.gather(*map(asyncio.shield, drains))
            return
        new = launched.add(engines - len(names))
        self._starting.update(dict.fromkeys(new))
        try:
            await self._wait_joined(launched, new)
        finally:
            for name in new:
                del self._starting[name]

    async def _wait_joined(self, launched: Engines, names: list[str]) -> None:
        timeout_s = self._settings.fleet.engine_start_timeout_s

        def is_settled(name: str) -> bool:
            return name in self.fleet.engines or self._starting[name] is not None

        try:
            async with asyncio.timeout(timeout_s):
                await self._pending.until(lambda: all(map(is_settled, names)))
        except TimeoutError:
            for name in names:
                if not is_settled(name):
                    self._starting[name] = f"not ready after {timeout_s:.0f} s"
        failed = {name: why for name in names if (why := self._starting[name]) is not None}
        for name in failed:
            launched.retire(name)
            launched.kill(name)
        for name, why in failed.items():
            raise EngineStartFailed(engine=name, why=why)

    def ended(self, engine: str, why: str) -> None:
        """Remove a local engine whose process has ended."""
        if engine in self._starting and engine not in self.fleet.engines:
            self._starting[engine] = why
        self._lose(engine, why)
        self._pending.notify()

    def give_up_engine(self, engine: str, why: str) -> None:
        """Remove an engine that did not reply in time."""
        self._lose(engine, why, is_crash=False)
        self.on_silent(engine)

    def _lose(self, engine: str, why: str, *, is_crash: bool = True) -> None:
        for event in self.fleet.lose(engine, why, is_crash=is_crash):
            self._run.handle(event)

    def _record(self, engine: str, name: str, at_us: int = 0, **about: int) -> None:
        if self._recorder is not None:
            at_us = at_us or time.monotonic_ns() // 1000
            self._recorder.engine_event(engine, name, at_us, **about)
