"""Pause state of an engine: whether sequences may start and run, and whether a weight swap is due.

Own, external and simulated engines share this state machine, which alone knows what a pause mode
does to running sequences. It moves none itself: its caller ends those that it is told to. At most
one pause and one swap are pending. A newer pause replaces the mode of an older one. A swap has a
pause mode too: ``wait`` lets the running sequences finish before the swap. Every pause that takes
effect before it is lifted is answered with ``TurnsPaused``.
"""

from tidegate.transport.messages import FinishWeightUpdate, PauseMode, TurnsPaused


def ends_turns(mode: PauseMode | None) -> bool:
    """Whether running sequences end now, to be continued on any engine."""
    return mode == "abort"


def lets_finish(mode: PauseMode | None) -> bool:
    """Whether running sequences finish first, under the weights that they run with."""
    return mode == "wait"


class PauseGate:
    """Decides from the pending pause and swap whether sequences may be admitted and may step."""

    def __init__(self) -> None:
        self._mode: PauseMode | None = None
        self._unanswered_modes: list[PauseMode] = []
        self._swap: FinishWeightUpdate | None = None
        self.is_held = False
        """Whether no sequence may run, regardless of pauses, because memory is asleep."""

    @property
    def mode(self) -> PauseMode | None:
        """Mode of the pause that is pending or in effect; None without a pause."""
        return self._mode

    @property
    def turns_start(self) -> bool:
        """Whether waiting sequences may be admitted to the running set."""
        draining = self._swap is not None and lets_finish(self._swap.pause_mode)
        return self._mode is None and not draining and not self.is_held

    @property
    def turns_run(self) -> bool:
        """Whether running sequences may step. A pause that ends them has already done so."""
        return not self.freezes_turns and not self.is_held

    @property
    def freezes_turns(self) -> bool:
        """Whether a pause stops running sequences in place, with their KV."""
        return self._mode == "keep"

    def pause(self, mode: PauseMode) -> bool:
        """Request a pause, or change the mode of the pending one; return whether the caller must
        end the running sequences."""
        self._mode = mode
        self._unanswered_modes.append(mode)
        return ends_turns(mode)

    def resume(self) -> None:
        """Lift the pause; pauses that have not taken effect never will, and are not answered."""
        self._mode = None
        self._unanswered_modes.clear()

    def take_effective(self, running_turns: int) -> list[TurnsPaused]:
        """Return one ``TurnsPaused`` reply for each pause that has taken effect and is not yet
        answered."""
        if not self._unanswered_modes or not self.is_pause_in_effect(running_turns):
            return []
        answers = [TurnsPaused(mode=mode) for mode in self._unanswered_modes]
        self._unanswered_modes.clear()
        return answers

    @property
    def is_pause_requested(self) -> bool:
        """Whether a pause is pending or in effect."""
        return self._mode is not None

    def is_pause_in_effect(self, running_turns: int) -> bool:
        """Whether a pause is in effect: at once, except that ``wait`` needs zero running
        sequences."""
        return self._mode is not None and not (lets_finish(self._mode) and running_turns)

    @property
    def is_swap_requested(self) -> bool:
        """Whether a swap to staged weights is pending."""
        return self._swap is not None

    def request_swap(self, update: FinishWeightUpdate) -> bool:
        """Request the swap that ``update`` asks for, in place of an earlier request; return whether
        the caller must end the running sequences."""
        self._swap = update
        return ends_turns(update.pause_mode)

    def swap_due(self, running_turns: int) -> FinishWeightUpdate | None:
        """Return the swap that can be done now. Sequences frozen with ``keep`` never finish, so no
        swap waits for them."""
        swap = self._swap
        if swap is None or (lets_finish(swap.pause_mode) and running_turns and self.turns_run):
            return None
        return swap

    def end_swap(self) -> None:
        """Clear the pending swap, because it is done or impossible. Harmless if none is pending."""
        self._swap = None
