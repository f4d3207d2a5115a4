"""Registry of running turns: assigns them to engines, and appends the tokens that engines sample.

:class:`GroupTracker` submits and cancels turns; :class:`Core` passes on engines' events. A turn may
have several submissions: after an abort, or the loss of an engine, the next submission continues
from the tokens sampled so far. ``placement.py`` chooses the engine, ``filing.py`` appends the
tokens.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from tidegate.orchestrator.core.events import (
    Cancel,
    Command,
    EndTurns,
    EngineJoined,
    FailTurn,
    StepArrived,
    Submit,
)
from tidegate.orchestrator.core.filing import EVALUATION_HANDLES_FROM, StepOutcome, TokenAppender
from tidegate.orchestrator.core.placement import EngineTurns, Placement, PlacementRules
from tidegate.orchestrator.core.provenance import TurnPrefill
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.media import MediaKind
from tidegate.transport.messages import (
    FINISH_REASONS,
    LENGTH,
    LIVE_ADAPTER,
    RUNNING,
    STOP,
    Prefill,
    SamplingParams,
    SubmitTurn,
)

CONSECUTIVE_LOSSES_MAX = 3
"""Consecutive engine losses after which a turn, or a scoring request, is refused as their cause. A
token of the turn ends the sequence."""

LOSSES_TOTAL_MAX = 9
"""Engine losses after which a turn is refused, tokens in between or not: three restarts of three
engines."""

HANDLES_PER_PROCESS = 1 << 24
"""Handles skipped at a resume, so that no engine gets a handle twice. A crashed process assigned
fewer handles than this after the last event in its journal."""


class ReleasedVersions:
    """Released and live versions of one adapter that the run trains, and which engines serve older
    ones. For the run's weights, :class:`TurnTracker` itself has ``live_version``."""

    def __init__(self) -> None:
        self.released = 0
        """Newest version that every engine has loaded; 0 before the first, when no turn runs."""
        self.live_version = 0
        """Oldest version that may sample a turn submitted now. Never falls."""
        self.held: dict[str, int] = {}
        """Engine -> version, for engines that may still serve an older one than ``released``."""

    @property
    def is_served(self) -> bool:
        """Whether turns can run: a version is released, and the trainer has not lost it since."""
        return 0 < self.live_version <= self.released

    @property
    def behind(self) -> set[str]:
        """Engines that serve a version older than ``live_version``, and get no turns: they missed
        a publish while they were away."""
        return {engine for engine, version in self.held.items() if version < self.live_version}

    def release(self, version: int, engines: Iterable[str]) -> None:
        """Record that ``engines``, all of the run, have loaded a version and swap to it now."""
        if self.released:
            for engine in engines:
                self.held.setdefault(engine, self.released)
        self.released = version
        self._raise_live_version()

    def serve(self, engine: str, version: int) -> None:
        """Record that an engine serves a version from now on."""
        self._hold(engine, version)
        self._raise_live_version()

    def join(self, engine: str, version: int | None) -> None:
        """Record that an engine joined, holding ``version``; None: it gets the newest when it needs
        one."""
        self._hold(engine, self.released if version is None else version)
        self._raise_live_version()

    def leave(self, engine: str) -> None:
        """Forget an engine that has left."""
        if self.held.pop(engine, None) is not None:
            self._raise_live_version()

    def recall(self, live_version: int) -> None:
        """Let no version older than ``live_version``, which is not released yet, sample now."""
        self.live_version = max(self.live_version, live_version)

    def _hold(self, engine: str, version: int) -> None:
        if version < self.released:
            self.held[engine] = version
        else:
            self.held.pop(engine, None)

    def _raise_live_version(self) -> None:
        oldest = min([self.released, *self.held.values()])
        self.live_version = max(self.live_version, oldest)


class TurnTracker:
    """Running turns: assigns each to an engine, and resubmits it when the engine is lost."""

    def __init__(self, rules: PlacementRules | None = None) -> None:
        self.engines: dict[str, EngineTurns] = {}
        self.placement = Placement(self.engines, rules or PlacementRules())
        self.live_version = 0
        """Oldest version that may sample a turn submitted now. Never falls."""
        self.is_served = True
        """Whether there is a version to sample with: the model directory's, from the start."""
        self.next_handle = 0
        self.adapters: Mapping[str, int] = {}
        """Newest released version of each adapter with versions of its own."""
        self.adapter_versions: dict[str, ReleasedVersions] = {}
        """Released and live versions of each adapter that the run trains, by adapter name."""
        self.halted: set[str] = set()
        """Trained adapters whose turns are on no engine until they are resumed."""
        self.waiting: dict[Turn, int] = {}
        """Turn -> priority, for turns that no engine can take now."""
        self.streams: dict[str, tuple[int, int]] = {}
        """Engine -> (epoch, seq of the first step whose tokens have not been appended)."""
        self.media_taken: set[MediaKind] = set()
        """Kinds of media that any engine so far reads; lost engines count, as they may return."""
        self.on_tokens_removed: Callable[[Rollout, int], None] = lambda rollout, tokens: None
        """Called when a refused turn's tokens are removed: with the rollout, which continues, and
        the number of tokens."""
        self._suspect: Turn | None = None
        """Turn last submitted among those suspected of crashing engines; None once it is cleared or
        has left its engine."""
        self._oldest: set[str] = set()
        """Engines that serve ``live_version`` or older; empty if they must be recomputed."""

    # ------------------------------------------------------------ engines

    def join(self, event: EngineJoined) -> list[Command]:
        """Add an engine, or continue with one that has reconnected.

        Some of the submitted turns that the engine does not hold ended in steps that it replays
        now. The others were lost in transit, and are submitted again after the replay.
        """
        name = event.engine
        commands: list[Command] = []
        engine = self.engines.get(name)
        if engine is not None and engine.epoch != event.epoch:
            commands += self.leave(name, is_crash=True)
            engine = None
        if engine is None:
            speed = self.placement.first_speed(name)
            engine = self.engines[name] = EngineTurns(0, 1, epoch=event.epoch, speed=speed)
        engine.weight_version = event.weight_version
        engine.max_running_turns = event.max_running_turns
        engine.is_away = False
        engine.media = event.media
        self.media_taken.update(event.media)
        self.placement.forget()
        engine.replay_until = event.replay_until
        if self.adapter_versions:
            held_versions = dict(event.adapters)
            for adapter, versions in self.adapter_versions.items():
                versions.join(name, held_versions.get(adapter))
        held = set(event.held)
        engine.missing = [handle for handle in engine.submissions if handle not in held]
        unknown = [handle for handle in event.held if handle not in engine.submissions]
        commands += [Cancel(name, handle) for handle in unknown]
        commands += self._send_missing(name, engine)
        self._raise_live_version()  # the message of its last swap may have been lost
        return commands + self.submit_waiting()

    def _send_missing(self, name: str, engine: EngineTurns) -> list[Command]:
        """Submit the turns missing on an engine to any engine, once the replay has arrived."""
        epoch, next_seq = self.streams.get(name, (engine.epoch, 0))
        if epoch == engine.epoch and next_seq < engine.replay_until:
            return []
        missing, engine.missing = engine.missing, []
        commands: list[Command] = []
        for handle in missing:
            lost = self._pop(name, handle)
            if lost is not None:  # None: it ended in the replay
                commands += [Cancel(name, handle), *self.submit(lost, lost.priority)]
        return commands

    def resume(self) -> None:
        """Mark all engines as away until their hello, because another process continues the run."""
        self.next_handle = (self.next_handle + HANDLES_PER_PROCESS) % EVALUATION_HANDLES_FROM
        self.placement.forget()
        for engine in self.engines.values():
            engine.is_away = True

    def recall(self, live_version: int, adapter: str = "") -> list[Command]:
        """Take all training turns of the run's weights, or of an adapter, back from their engines,
        with the tokens they have; they continue under ``live_version`` or newer.

        Tokens that engines have sampled for these turns and that have not arrived are late.
        """
        taken = self._take_back(adapter, has_evaluations=False)
        self.require(live_version, adapter)
        return [Cancel(engine, handle) for engine, handle in taken]

    def require(self, live_version: int, adapter: str = "") -> None:
        """Submit turns of the run's weights, or of an adapter, to engines with ``live_version`` or
        newer only."""
        if adapter:
            self.adapter_versions[adapter].recall(live_version)
            return
        self.placement.forget()
        self._oldest = set()
        self.live_version = max(self.live_version, live_version)

    def halt(self, adapter: str, is_halted: bool) -> list[Command]:
        """Take all training turns of a trained adapter back from their engines, with the tokens
        they have, or submit them again."""
        if not is_halted:
            self.halted.discard(adapter)
            return self.submit_waiting()
        self.halted.add(adapter)
        return [Cancel(engine, handle) for engine, handle in self._take_back(adapter)]

    def _take_back(self, adapter: str, *, has_evaluations: bool = True) -> list[tuple[str, int]]:
        """Move the turns of an adapter's rollouts (empty: of the run's weights) from engines to
        ``waiting``; return where they were. ``has_evaluations``: turns of evaluations too."""
        taken: list[tuple[str, int]] = []
        for name, engine in self.engines.items():
            submissions = engine.submissions
            mine = [
                (h, t)
                for h, t in submissions.items()
                if t.rollout.adapter == adapter and (has_evaluations or not t.is_evaluation)
            ]
            for handle, turn in sorted(mine, key=lambda item: item[1].priority):
                turn.place = None
                self.waiting[turn] = turn.priority
                del submissions[handle]
                taken.append((name, handle))
        self.placement.forget()
        return taken

    def leave(self, engine: str, *, is_crash: bool) -> list[Command]:
        """Remove an engine; its turns continue elsewhere, oldest group first.

        A crash counts as a loss of each of the engine's turns. A turn with too many losses is
        refused, because it would crash the next engine too. An engine that is not there after a
        resume counts as no crash: it probably ended with the orchestrator's process.
        """
        removed = self.engines.pop(engine, None)
        if removed is None:
            return []
        removed.filing.end()
        self.placement.forget()
        for versions in self.adapter_versions.values():
            versions.leave(engine)
        self._raise_live_version()
        lost_turns = sorted(removed.submissions.values(), key=lambda turn: turn.priority)
        for turn in lost_turns:
            turn.place = None
            if is_crash and not removed.is_away:
                turn.losses += 1
                has_tokens = turn.length > turn.sampled_before
                turn.consecutive_losses = 1 if has_tokens else turn.consecutive_losses + 1
        commands = [c for turn in lost_turns for c in self.submit(turn, turn.priority)]
        return commands + self._send_next_suspect()

    def drain(self, name: str) -> None:
        """Give an engine no more turns; it keeps those that it has until they end or it leaves."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.is_draining = True
            self.placement.forget()

    def keep_for_evaluation(self, name: str, *, is_kept: bool) -> list[Command]:
        """Keep an engine for evaluations, and move its other turns; or return it to training."""
        engine = self.engines.get(name)
        if engine is None:
            return []
        engine.is_for_evaluation = is_kept
        self.placement.forget()
        self._raise_live_version()
        commands: list[Command] = []
        if is_kept:
            turns = sorted(engine.submissions.items(), key=lambda each: each[1].priority)
            for handle, turn in turns:
                if turn.rollout.pinned_version is None:
                    self._pop(name, handle)
                    commands += [Cancel(name, handle), *self.submit(turn, turn.priority)]
        return commands + self.submit_waiting()

    def swap(self, engine: str, version: int) -> list[Command]:
        """Record that an engine serves ``version`` from now on, and submit waiting turns."""
        turns = self.engines.get(engine)
        if turns is not None:
            turns.weight_version = version
            self.placement.rank(engine, self.live_version)
            if version > self.live_version:
                self._oldest.discard(engine)
            if not self._oldest:  # otherwise their version is still the live one
                self._raise_live_version()
        return self.submit_waiting()

    def _raise_live_version(self) -> None:
        versions = {
            name: each.weight_version
            for name, each in self.engines.items()
            if not each.is_for_evaluation
        }
        live = self.live_version = max(self.live_version, min(versions.values(), default=0))
        self._oldest = {name for name, version in versions.items() if version <= live}

    # ------------------------------------------------------------ submission

    def submit(self, turn: Turn, priority: int) -> list[Command]:
        """Send a turn, with its tokens so far, to the engine that routing chooses.

        An engine that serves weights older than ``live_version`` (a late joiner) gets no turns,
        because their tokens could exceed the staleness that admission has allowed for.
        """
        own, trained = turn.sampling, turn.rollout.adapter
        if trained or (own.adapter and self._has_own_versions(own)):
            if not turn.is_evaluation and own.adapter != trained:
                return [self._refuse(turn, _other_policy_message(own.adapter, trained))]
            if own.adapter_version is None:  # kept in the turn, because recorders read it there
                turn.sampling = replace(own, adapter_version=LIVE_ADAPTER)
            if trained and not self._is_served(trained):
                turn.place = None
                self.waiting[turn] = priority
                return []
        if turn.losses:
            if turn.consecutive_losses >= CONSECUTIVE_LOSSES_MAX or turn.losses >= LOSSES_TOTAL_MAX:
                return [self._refuse(turn, _crash_message(turn))]
            if _is_suspect(turn) and self._is_suspect_untested:
                turn.place = None
                self.waiting[turn] = priority
                return []
        if (version := turn.rollout.pinned_version) is not None:
            name = self.placement.choose_pinned(version)
            if name is None:
                return [
                    self._refuse(turn, f"no engine serves the evaluated version v{version} now")
                ]
            return [self._send(turn, priority, name)]
        behind = self.adapter_versions[trained].behind if trained else ()
        name = self.placement.choose(turn, self.next_handle, self.live_version, behind)
        if name is not None:
            return [self._send(turn, priority, name)]
        turn.place = None
        if why := self._placement_error(turn):
            return [self._refuse(turn, why)]
        self.waiting[turn] = priority
        return []

    def _is_served(self, adapter: str) -> bool:
        """Whether turns of a trained adapter may run: it has a version, and is not halted."""
        return self.adapter_versions[adapter].is_served and adapter not in self.halted

    def _has_own_versions(self, sampling: SamplingParams) -> bool:
        """Whether a turn's adapter has weight versions of its own."""
        return sampling.adapter_version is not None or sampling.adapter in self.adapters

    def _placement_error(self, turn: Turn) -> str:
        """Return why no engine of the run can take a turn; empty if an engine may."""
        if not self.engines or any(engine.is_away for engine in self.engines.values()):
            return ""
        missing_kinds = sorted({each.kind for each in turn.rollout.media} - self.media_taken)
        if not missing_kinds:
            return ""
        return (
            f"the context has media of kind {', '.join(missing_kinds)}, which no engine of this "
            "run reads; use engines that read them (docs/agents.md), or remove them from the "
            "context"
        )

    def _send(self, turn: Turn, priority: int, name: str) -> Submit:
        handle = self.next_handle
        self.next_handle = (handle + 1) % EVALUATION_HANDLES_FROM
        if turn.is_evaluation:
            handle += EVALUATION_HANDLES_FROM
        rollout, sampling = turn.rollout, turn.sampling
        if turn.deferred_tokens is not None:
            turn.settle()
        length = turn.filed
        self.engines[name].submissions[handle] = turn
        turn.place = (name, handle)
        turn.priority, turn.sampled_before, turn.sampled_by = priority, length, -1
        if turn.losses and _is_suspect(turn):
            self._suspect = turn
        self.placement.rank(name, self.live_version)
        if length:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - length)
        message = SubmitTurn(
            turn=handle,
            token_ids=turn.filed_token_ids.tobytes(),
            sampling=sampling,
            priority=priority,
            sampled_before=length,
            session=rollout.rollout_id + 1,  # 0 means no session
            media=rollout.media if rollout.may_have_media else [],
        )
        return Submit(name, message)

    def move(self, turn: Turn, to: str) -> list[Command]:
        """Continue a running turn on another engine from its tokens so far, with the same priority.

        Tokens that the old engine samples before it receives the cancel are counted as late.
        Returns no command if the turn has ended, if it is on engine ``to`` already, if ``to`` may
        not take it or serves older weights than the old engine, or if the old engine is away.
        """
        if turn.place is None or turn.length >= turn.sampling.max_tokens:
            return []
        name, handle = turn.place
        engine = self.engines[name]
        if name == to or engine.is_away or not self.placement.is_open(to, self.live_version):
            return []
        if self.engines[to].weight_version < engine.weight_version:
            return []
        if turn.rollout.adapter and to in self.adapter_versions[turn.rollout.adapter].held:
            return []
        if turn.rollout.media and not self.placement.takes_media(to, turn):
            return []
        moved = self._pop(name, handle)
        assert moved is not None, f"turn {handle} is not on {name}"
        return [Cancel(name, handle), self._send(turn, moved.priority, to)]

    def _move_stragglers(self, event: StepArrived) -> list[Command]:
        commands: list[Command] = []
        for move in self.placement.moves(event, self.live_version):
            commands += self.move(self.engines[move.engine].submissions[move.handle], move.to)
        return commands

    # ------------------------------------------------------------ turns that may crash engines

    @property
    def _is_suspect_untested(self) -> bool:
        """Whether an engine has a suspect turn that it has not sampled a token for yet.

        All turns that were lost with the same engines are suspects. They are submitted one at a
        time, so that the next lost engine shows which turn crashes engines.
        """
        turn = self._suspect
        return turn is not None and turn.place is not None and turn.length == turn.sampled_before

    def _send_next_suspect(self) -> list[Command]:
        """Submit the next suspect turn, once the last suspect has a token or left its engine."""
        if self._suspect is None or self._is_suspect_untested:
            return []
        if (turn := self._suspect).length > turn.sampled_before:
            turn.consecutive_losses = 0
        self._suspect = None
        return self.submit_waiting()

    def find_suspect(self) -> None:
        """Find the suspect turn that is on an engine, after a saved state was loaded."""
        placed = (turn for each in self.engines.values() for turn in each.submissions.values())
        suspects = (t for t in placed if _is_suspect(t) and t.length == t.sampled_before)
        self._suspect = next(suspects, None)

    def submit_waiting(self) -> list[Command]:
        """Submit the turns that waited, as far as engines can take them now."""
        if not self.waiting or not self.placement.has_any(self.live_version):
            return []
        waiting, self.waiting = self.waiting, {}
        return [c for turn, priority in waiting.items() for c in self.submit(turn, priority)]

    def cancel(self, rollout: Rollout) -> list[Command]:
        """Cancel the current turn of this rollout, if it has one."""
        turn = rollout.turns[-1] if rollout.turns else None
        if turn is None or turn.finish_reason is not None:
            return []
        self.waiting.pop(turn, None)
        if turn.place is None:
            return []
        name, handle = turn.place
        self._pop(name, handle)
        return [Cancel(name, handle), *self._send_next_suspect()]

    def reject(self, engine: str, handle: int, message: str) -> list[Command]:
        """Fail a turn that an engine has rejected for good, with the engine's ``message``."""
        turn = self._pop(engine, handle)
        return [] if turn is None else [self._refuse(turn, message), *self._send_next_suspect()]

    def _refuse(self, turn: Turn, why: str) -> FailTurn:
        """Fail a turn and remove its tokens, because its episode gets an exception instead."""
        turn.finish_reason = "refused"
        self.on_tokens_removed(turn.rollout, turn.remove_tokens())
        return FailTurn(turn, why)

    def _pop(self, engine: str, handle: int) -> Turn | None:
        turns = self.engines.get(engine)
        turn = turns.submissions.pop(handle, None) if turns else None
        if turn is not None:
            turn.place = None
            self.placement.rank(engine, self.live_version)
        return turn

    # ------------------------------------------------------------ tokens in

    def step(self, event: StepArrived) -> StepOutcome:
        """Append a step's tokens to their turns, and end the turns that finished."""
        engine = self.engines.get(event.engine)
        submissions = engine.submissions if engine else {}
        for prefill in event.prefills:
            self._file_prefill(submissions.get(prefill.turn), prefill)
        for attachment in event.attachments:
            turn = submissions.get(attachment.turn)
            if turn is not None and turn.attachments is not None:
                turn.attachments.append(attachment, tokens_before=turn.sampled_before)
        filing = engine.filing if engine else TokenAppender()
        outcome = filing.file(submissions, event)
        if event.finish:
            outcome.commands += self._end_turns(event, engine)
        outcome.commands += self._stop_overrun(event)
        self.streams[event.engine] = (event.epoch, event.seq + 1)
        if engine is not None and engine.missing:
            outcome.commands += self._send_missing(event.engine, engine)
        if self._suspect is not None:
            outcome.commands += self._send_next_suspect()
        if engine is not None and self.placement.watches_steps:
            self.placement.measure(event, self.live_version)
            outcome.commands += self._move_stragglers(event)
        return outcome

    def _end_turns(self, event: StepArrived, engine: EngineTurns | None) -> list[Command]:
        """Report the turns that have ended in one command, and resubmit those that were cut off."""
        ended: list[Turn] = []
        commands: list[Command] = []
        for turn, code in self._take_ended(event, engine):
            if self._finish(turn, code):
                ended.append(turn)
            else:
                commands += self._continue_turn(turn)
        return [EndTurns(ended), *commands] if ended else commands

    def _take_ended(self, event: StepArrived, engine: EngineTurns | None) -> list[tuple[Turn, int]]:
        """Remove the turns that leave their engine with this step; return them and finish codes."""
        if engine is None:
            return []
        taken: list[tuple[Turn, int]] = []
        for handle, code in zip(event.turns.tolist(), event.finish, strict=True):
            if code != RUNNING and (ended := engine.submissions.pop(handle, None)) is not None:
                ended.place = None
                taken.append((ended, code))
        self.placement.rank(event.engine, self.live_version)
        return taken

    @staticmethod
    def _file_prefill(turn: Turn | None, prefill: Prefill) -> None:
        if turn is not None:
            at = turn.sampled_before + prefill.output_tokens
            turn.prefills = (*turn.prefills, TurnPrefill(at, tuple(prefill.spans)))

    def _stop_overrun(self, event: StepArrived) -> list[Command]:
        """Check one of a step's turns, a different one at each step, for excess tokens."""
        if not event.turns:
            return []
        handle = event.turns[event.seq % len(event.turns)]
        engine = self.engines.get(event.engine)
        turn = engine.submissions.get(handle) if engine else None
        if turn is None or turn.length <= turn.sampling.max_tokens:
            return []
        why = _overrun_message(turn)
        return [Cancel(event.engine, handle), *self.reject(event.engine, handle, why)]

    @staticmethod
    def _finish(turn: Turn, code: int) -> bool:
        """Set a turn's finish reason and return True; False if the engine cut the turn off."""
        left = turn.sampling.max_tokens - turn.length
        if left < 0 or (left and code != STOP and code != LENGTH):
            return False
        turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return True

    def _continue_turn(self, turn: Turn) -> list[Command]:
        """Resubmit a turn that was cut off; refuse it if it has more tokens than requested."""
        if turn.length > turn.sampling.max_tokens:
            return [self._refuse(turn, _overrun_message(turn))]
        return self.submit(turn, turn.priority)


def _is_suspect(turn: Turn) -> bool:
    """Whether one more engine lost with this turn would show that the turn crashes engines."""
    return turn.consecutive_losses >= CONSECUTIVE_LOSSES_MAX - 1


def _other_policy_message(adapter: str, trained: str) -> str:
    if trained:
        return (
            f"this rollout is adapter {trained!r}'s, and a turn of it asked for "
            f"{f'adapter {adapter!r}' if adapter else 'the base'}, whose tokens its trainer can't "
            f"use; sample other adapters by `episode.agent(name)`"
        )
    return (
        f"adapter {adapter!r} has weight versions of its own, so its tokens are no part of the "
        f"base's batches; train it by `rollouts.train_adapter({adapter!r})`, evaluate() with it, "
        f"or publish it with publish_adapter"
    )


def _crash_message(turn: Turn) -> str:
    return (
        f"{turn.losses} engines were lost with this turn, the last {turn.consecutive_losses} "
        f"of them before it got a token, so it probably crashes them and is not sent to another "
        f"engine. It has {turn.start} tokens of context and "
        f"max_tokens={turn.sampling.max_tokens}; see the engines' logs for how they ended"
    )


def _overrun_message(turn: Turn) -> str:
    return (
        f"the engine sampled {turn.length} tokens of max_tokens={turn.sampling.max_tokens}, which "
        f"is a bug in the engine"
    )
