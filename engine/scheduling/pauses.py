"""Pause state of an engine: whether sequences may start and run, and whether a weight swap is due.

Own, external and simulated engines share this state machine. It moves no sequences itself. At most
one pause and one swap are pending. A newer pause replaces the mode of an older one. A swap has a
pause mode too: ``wait`` lets the running sequences finish before the swap. Every pause that takes
effect before it is lifted is answered with ``TurnsPaused``.
"""

from tidegate.transport.messages import FinishWeightUpdate, PauseMode, TurnsPaused


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
        draining = self._swap is not None and self._swap.pause_mode == "wait"
        return self._mode is None and not draining and not self.is_held

    @property
    def turns_run(self) -> bool:
        """Whether running sequences may step. Only the pause mode ``keep`` stops them: ``abort``
        has already ended them, and ``wait`` lets them finish."""
        return self._mode != "keep" and not self.is_held

    def pause(self, mode: PauseMode) -> None:
        """Request a pause, or change the mode of the pending one."""
        self._mode = mode
        self._unanswered_modes.append(mode)

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
        return self._mode is not None and (self._mode != "wait" or running_turns == 0)

    @property
    def is_swap_requested(self) -> bool:
        """Whether a swap to staged weights is pending."""
        return self._swap is not None

    def request_swap(self, update: FinishWeightUpdate) -> None:
        """Request the swap that ``update`` asks for, with its pause mode. It replaces an earlier
        request."""
        self._swap = update

    def swap_due(self, running_turns: int) -> FinishWeightUpdate | None:
        """Return the swap that can be done now. Sequences frozen with ``keep`` never finish, so no
        swap waits for them."""
        swap = self._swap
        if swap is None or (swap.pause_mode == "wait" and running_turns > 0 and self.turns_run):
            return None
        return swap

    def end_swap(self) -> None:
        """Clear the pending swap, because it is done or impossible. Harmless if none is pending."""
        self._swap = None
