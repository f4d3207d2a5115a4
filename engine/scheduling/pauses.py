"""May turns start, may they run, and may new weights be swapped in? Moves nothing itself.

One pause and one swap can be asked for at a time; a newer pause replaces the mode of an older
one. Every pause that was not lifted before it took effect is answered.
"""

from tidegate.transport.messages import FinishWeightUpdate, Paused, PauseMode


class PauseGate:
    """What pauses and weight updates allow, given how many turns run."""

    def __init__(self) -> None:
        self._mode: PauseMode | None = None
        self._unanswered: list[PauseMode] = []
        self._swap: FinishWeightUpdate | None = None
        self.is_held = False
        """Whether no turn may run whatever pauses say, for want of memory."""

    @property
    def mode(self) -> PauseMode | None:
        """How a pause that is on, or will be, stops turns; None: there is none."""
        return self._mode

    @property
    def turns_start(self) -> bool:
        """Whether waiting turns may start."""
        draining = self._swap is not None and self._swap.pause_mode == "wait"
        return self._mode is None and not draining and not self.is_held

    @property
    def turns_run(self) -> bool:
        """Whether running turns go on; ``abort`` has ended them, ``wait`` lets them finish."""
        return self._mode != "keep" and not self.is_held

    def pause(self, mode: PauseMode) -> None:
        """Ask for a pause, or change the mode of the one there is."""
        self._mode = mode
        self._unanswered.append(mode)

    def resume(self) -> None:
        """Lift the pause; those not in effect yet never will be, and are not answered."""
        self._mode = None
        self._unanswered.clear()

    def take_effective(self, running_turns: int) -> list[Paused]:
        """Answers to the pauses that are in effect now."""
        if not self._unanswered or not self.is_pause_in_effect(running_turns):
            return []
        answers = [Paused(mode=mode) for mode in self._unanswered]
        self._unanswered.clear()
        return answers

    @property
    def is_pause_asked(self) -> bool:
        """Whether a pause is on, or will be."""
        return self._mode is not None

    def is_pause_in_effect(self, running_turns: int) -> bool:
        """Whether a pause is on; frozen turns run no more than ended ones."""
        return self._mode is not None and (self._mode != "wait" or running_turns == 0)

    @property
    def is_swap_asked(self) -> bool:
        """Whether new weights are to be swapped in."""
        return self._swap is not None

    def ask_swap(self, update: FinishWeightUpdate) -> None:
        """Ask for new weights; asking again changes how."""
        self._swap = update

    def swap_due(self, running_turns: int) -> FinishWeightUpdate | None:
        """The swap that can be done now. Frozen turns never finish, so none waits for them."""
        swap = self._swap
        if swap is None or (swap.pause_mode == "wait" and running_turns > 0 and self.turns_run):
            return None
        return swap

    def end_swap(self) -> None:
        """The swap is done, or can't be any more. Harmless if none was asked for."""
        self._swap = None
