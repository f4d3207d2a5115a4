"""Which turn is where? Sends turns to engines and files what comes back. No I/O, no clock.

It knows engines, handles and tokens; not groups, rewards or batches. A turn outlives its
submissions: an abort, or the loss of an engine, only means that the next one starts from the
tokens sampled so far.
"""

from collections.abc import Callable

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
from tidegate.orchestrator.core.filing import EVALUATION_HANDLES_FROM, Filing, StepOutcome
from tidegate.orchestrator.core.placement import EngineTurns, Placement, PlacementRules
from tidegate.orchestrator.core.provenance import TurnPrefill
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.media import MediaKind
from tidegate.transport.messages import (
    FINISH_REASONS,
    LENGTH,
    RUNNING,
    STOP,
    Prefill,
    SubmitTurn,
)

LOSSES_MAX = 3
"""Engines that a turn, or a request to score, may lose in a row before it is taken for what ends
them. Only losses without a token of the turn in between count."""

LOSSES_IN_ALL_MAX = 9
"""Engines that a turn may lose even if it gets tokens in between: as many as three restarts of each
of three engines."""

HANDLES_PER_PROCESS = 1 << 24
"""After a resume, handles go on so far ahead: the ones that a crashed process gave out and could
not write down are fewer, so none is given to an engine twice."""


class TurnBook:
    """All turns that are going on, by engine and handle."""

    def __init__(self, rules: PlacementRules | None = None) -> None:
        self.engines: dict[str, EngineTurns] = {}
        self.placement = Placement(self.engines, rules or PlacementRules())
        self.live_version = 0
        """The oldest weights that a turn submitted now could be sampled by. Never falls."""
        self.next_handle = 0
        self.waiting: dict[Turn, int] = {}
        """Turns with their priorities, for which there is no engine now."""
        self.streams: dict[str, tuple[int, int]] = {}
        """Engine -> (epoch, next seq): which of its steps have been taken in."""
        self.media_taken: set[MediaKind] = set()
        """What any engine so far has read beside tokens: one that was lost may come back."""
        self.unwanted: Callable[[Rollout, int], None] = lambda rollout, tokens: None
        """Told of tokens that were taken back from a rollout that goes on."""
        self._suspect: Turn | None = None
        """The turn that was sent last of those that may be what ends engines."""
        self._oldest: set[str] = set()
        """Engines that serve ``live_version`` or older; empty: to be looked at anew."""

    # ------------------------------------------------------------ engines

    def join(self, event: EngineJoined) -> list[Command]:
        """An engine came, or its connection broke and is back: then its turns go on.

        Of the turns that it should have and doesn't hold, some have ended in steps that it sends
        again now; the others were lost on the way, and are sent anew after those steps.
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
        held = set(event.held)
        engine.missing = [handle for handle in engine.submissions if handle not in held]
        unknown = [handle for handle in event.held if handle not in engine.submissions]
        commands += [Cancel(name, handle) for handle in unknown]
        commands += self._send_missing(name, engine)
        self._raise_live_version()  # the word of its last swap may have been lost
        return commands + self._submit_waiting()

    def _send_missing(self, name: str, engine: EngineTurns) -> list[Command]:
        """Send what an engine has lost anew, here or elsewhere, once its replay is in."""
        epoch, next_seq = self.streams.get(name, (engine.epoch, 0))
        if epoch == engine.epoch and next_seq < engine.replay_until:
            return []
        missing, engine.missing = engine.missing, []
        commands: list[Command] = []
        for handle in missing:
            lost = self._pop(name, handle)
            if lost is not None:  # else it has ended in the replay
                commands += [Cancel(name, handle), *self.submit(lost, lost.priority)]
        return commands

    def resume(self) -> None:
        """Another process goes on: no engine is there until it says hello."""
        self.next_handle = (self.next_handle + HANDLES_PER_PROCESS) % EVALUATION_HANDLES_FROM
        self.placement.forget()
        for engine in self.engines.values():
            engine.is_away = True

    def recall(self, live_version: int) -> None:
        """Take every turn back; they go on under ``live_version`` or newer."""
        for engine in self.engines.values():
            for turn in sorted(engine.submissions.values(), key=lambda turn: turn.priority):
                turn.place = None
                self.waiting[turn] = turn.priority
            engine.submissions.clear()
        self.placement.forget()
        self._oldest = set()
        self.live_version = max(self.live_version, live_version)

    def leave(self, engine: str, *, is_crash: bool) -> list[Command]:
        """An engine is gone: its turns go on elsewhere, oldest group first.

        After a crash each turn that was lost counts it, and the turn that has lost too many engines
        is refused: the next engine would be lost with it.
        """
        gone = self.engines.pop(engine, None)
        if gone is None:
            return []
        gone.filing.end()
        self.placement.forget()
        self._raise_live_version()
        orphans = sorted(gone.submissions.values(), key=lambda turn: turn.priority)
        for orphan in orphans:
            orphan.place = None
            if is_crash:
                orphan.losses += 1
                has_tokens = orphan.length > orphan.sampled_before
                orphan.losses_in_vain = 1 if has_tokens else orphan.losses_in_vain + 1
        commands = [c for orphan in orphans for c in self.submit(orphan, orphan.priority)]
        return commands + self._send_next_suspect()

    def swap(self, engine: str, version: int) -> list[Command]:
        """An engine serves ``version`` from now on."""
        held = self.engines.get(engine)
        if held is not None:
            held.weight_version = version
            self.placement.rank(engine, self.live_version)
            if version > self.live_version:
                self._oldest.discard(engine)
            if not self._oldest:  # else the version that they serve is live still
                self._raise_live_version()
        return self._submit_waiting()

    def _raise_live_version(self) -> None:
        versions = [e.weight_version for e in self.engines.values()]
        live = self.live_version = max(self.live_version, min(versions, default=0))
        self._oldest = {name for name, e in self.engines.items() if e.weight_version <= live}

    # ------------------------------------------------------------ turns out

    def submit(self, turn: Turn, priority: int) -> list[Command]:
        """Send a turn, with what it has sampled so far, to the engine that routing chooses.

        An engine that serves weights older than ``live_version`` (a late joiner) gets none, for
        its tokens could be older than admission has counted on.
        """
        if turn.losses:
            if turn.losses_in_vain >= LOSSES_MAX or turn.losses >= LOSSES_IN_ALL_MAX:
                return [self._refuse(turn, _ends_engines(turn))]
            if _is_suspect(turn) and self._is_suspect_out:
                turn.place = None
                self.waiting[turn] = priority
                return []
        name = self.placement.choose(turn, self.next_handle, self.live_version)
        if name is not None:
            return [self._send(turn, priority, name)]
        turn.place = None
        if why := self._never_taken(turn):
            return [self._refuse(turn, why)]
        self.waiting[turn] = priority
        return []

    def _never_taken(self, turn: Turn) -> str:
        """Why a turn waits for an engine in vain; empty, if one may come."""
        if not self.engines or any(engine.is_away for engine in self.engines.values()):
            return ""
        lacking = sorted({each.kind for each in turn.rollout.media} - self.media_taken)
        if not lacking:
            return ""
        return (
            f"the context has media of kind {', '.join(lacking)}, which no engine of this run "
            f"reads; serve a model that does by an engine that takes media (docs/agents.md), or "
            f"leave them out"
        )

    def _send(self, turn: Turn, priority: int, name: str) -> Submit:
        handle = self.next_handle
        self.next_handle = (handle + 1) % EVALUATION_HANDLES_FROM
        if turn.is_evaluation:
            handle += EVALUATION_HANDLES_FROM
        rollout, sampling = turn.rollout, turn.sampling
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
            session=rollout.rollout_id + 1,  # 0 is nobody's
            media=rollout.media if rollout.may_have_media else [],
        )
        return Submit(name, message)

    def move(self, turn: Turn, to: str) -> list[Command]:
        """Have a running turn go on elsewhere from its tokens so far, with the same priority.

        What its old engine samples until it hears of that is unwanted, and counted so. A turn that
        has ended, is there already, or may not be sent there stays where it is; so does one whose
        engine is away, or serves newer weights than the other: it would fall behind again.
        """
        if turn.place is None or turn.length >= turn.sampling.max_tokens:
            return []
        name, handle = turn.place
        engine = self.engines[name]
        if name == to or engine.is_away or not self.placement.is_open(to, self.live_version):
            return []
        if self.engines[to].weight_version < engine.weight_version:
            return []
        if turn.rollout.media and not self.placement.takes_media(to, turn):
            return []
        moved = self._pop(name, handle)
        assert moved is not None, f"turn {handle} is not on {name}"
        return [Cancel(name, handle), self._send(turn, moved.priority, to)]

    def _relieve(self, event: StepArrived) -> list[Command]:
        """Move the stragglers, if it is time to."""
        commands: list[Command] = []
        for move in self.placement.moves(event, self.live_version):
            commands += self.move(self.engines[move.engine].submissions[move.handle], move.to)
        return commands

    # ------------------------------------------------------------ turns that may end engines

    @property
    def _is_suspect_out(self) -> bool:
        """Whether an engine has a suspect turn that it has not sampled from yet.

        The turns that were lost together with the one that ends engines are suspects like it. They
        are sent one at a time, so that the engine that is lost next tells which one it was.
        """
        turn = self._suspect
        return turn is not None and turn.place is not None and turn.length == turn.sampled_before

    def _send_next_suspect(self) -> list[Command]:
        """Send another suspect turn, once the last one has got a token or left its engine."""
        if self._suspect is None or self._is_suspect_out:
            return []
        if (turn := self._suspect).length > turn.sampled_before:
            turn.losses_in_vain = 0
        self._suspect = None
        return self._submit_waiting()

    def find_suspect(self) -> None:
        """Find the suspect turn that is out, after a saved state was loaded."""
        placed = (turn for each in self.engines.values() for turn in each.submissions.values())
        suspects = (t for t in placed if _is_suspect(t) and t.length == t.sampled_before)
        self._suspect = next(suspects, None)

    def _submit_waiting(self) -> list[Command]:
        if not self.waiting or not self.placement.has_any(self.live_version):
            return []
        waiting, self.waiting = self.waiting, {}
        return [c for turn, priority in waiting.items() for c in self.submit(turn, priority)]

    def cancel(self, rollout: Rollout) -> list[Command]:
        """Forget whatever turn of this rollout is going on."""
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
        """An engine can never serve this turn."""
        turn = self._pop(engine, handle)
        return [] if turn is None else [self._refuse(turn, message), *self._send_next_suspect()]

    def _refuse(self, turn: Turn, why: str) -> FailTurn:
        """What it has sampled so far nobody is given, so nobody trains on it."""
        turn.finish_reason = "refused"
        self.unwanted(turn.rollout, turn.take_back())
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
        """File a step's tokens under their turns."""
        engine = self.engines.get(event.engine)
        submissions = engine.submissions if engine else {}
        for prefill in event.prefills:
            self._file_prefill(submissions.get(prefill.turn), prefill)
        if event.details:
            _file_details(event, submissions)
        filing = engine.filing if engine else Filing()
        outcome = filing.file(submissions, event)
        if event.finish:
            outcome.commands += self._end_turns(event, engine)
        outcome.commands += self._stop_one_overrun(event)
        self.streams[event.engine] = (event.epoch, event.seq + 1)
        if engine is not None and engine.missing:
            outcome.commands += self._send_missing(event.engine, engine)
        if self._suspect is not None:
            outcome.commands += self._send_next_suspect()
        if engine is not None and self.placement.watches_steps:
            self.placement.measure(event, self.live_version)
            outcome.commands += self._relieve(event)
        return outcome

    def _end_turns(self, event: StepArrived, engine: EngineTurns | None) -> list[Command]:
        """Those that have ended are told of together; others that leave their engine go on."""
        ended: list[Turn] = []
        commands: list[Command] = []
        for turn, code in self._take_ended(event, engine):
            if self._finish(turn, code):
                ended.append(turn)
            else:
                commands += self._go_on(turn)
        return [EndTurns(ended), *commands] if ended else commands

    def _take_ended(self, event: StepArrived, engine: EngineTurns | None) -> list[tuple[Turn, int]]:
        """The turns that leave their engine with this step, and how."""
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
            at = turn.sampled_before + prefill.at
            turn.prefills = (*turn.prefills, TurnPrefill(at, tuple(prefill.spans)))

    def _stop_one_overrun(self, event: StepArrived) -> list[Command]:
        """Look at one of a step's turns, each time at another: past its end, none goes on long."""
        if not event.turns:
            return []
        handle = event.turns[event.seq % len(event.turns)]
        engine = self.engines.get(event.engine)
        turn = engine.submissions.get(handle) if engine else None
        if turn is None or turn.length <= turn.sampling.max_tokens:
            return []
        why = _overrun(turn)
        return [Cancel(event.engine, handle), *self.reject(event.engine, handle, why)]

    @staticmethod
    def _finish(turn: Turn, code: int) -> bool:
        """Note how a turn has ended, if it has: one that was cut off before its time has not."""
        left = turn.sampling.max_tokens - turn.length
        if left < 0 or (left and code not in (STOP, LENGTH)):
            return False
        turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return True

    def _go_on(self, turn: Turn) -> list[Command]:
        """A turn that was cut off is sent again; one past its end nobody can vouch for."""
        if turn.length > turn.sampling.max_tokens:
            return [self._refuse(turn, _overrun(turn))]
        return self.submit(turn, turn.priority)


def _is_suspect(turn: Turn) -> bool:
    """Whether one engine more that is lost with this turn shows that the turn ends engines."""
    return turn.losses_in_vain >= LOSSES_MAX - 1


def _ends_engines(turn: Turn) -> str:
    return (
        f"{turn.losses} engines were lost with this turn, the last {turn.losses_in_vain} of them "
        f"before a token of it, so it goes to no other: is it what ends them? It had {turn.start} "
        f"tokens of context and asked for {turn.sampling.max_tokens}; engines' logs say how they "
        f"ended"
    )


def _overrun(turn: Turn) -> str:
    return (
        f"the engine sampled {turn.length} tokens where at most {turn.sampling.max_tokens} were "
        f"asked for; it has a defect"
    )


def _file_details(event: StepArrived, submissions: dict[int, Turn]) -> None:
    """What was told of tokens beside their log-probs, under turns that asked for it."""
    counts = [1] * len(event.turns) if event.counts is None else event.counts.tolist()
    tokens = dict(zip(event.turns.tolist(), counts, strict=True))
    for told in event.details:
        turn = submissions.get(told.turn)
        if turn is not None and turn.details is not None:
            turn.details.append(told, tokens.get(told.turn, 0), before=turn.length)
