"""Which process is which rank of a remote trainer, and which ranks are gone?

It reads no clock and no socket: who was heard, and when, it is told.
"""

from dataclasses import dataclass

from tidegate.errors import ConfigError

TAKEOVER_SILENCE_S = 5.0
"""A seat may be taken from a process that was not heard for so long: five heartbeats. It has died,
most likely; should it speak again, it is told that it lost the seat."""

WORLD_SIZE_MAX = 4096


class SeatTaken(Exception):
    """Another living process has it: ask again in a while."""


@dataclass(slots=True)
class Seat:
    """A rank's process."""

    peer: bytes
    rank: int
    heard_s: float


class Seats:
    """The ranks of one trainer. Its world may change once all of them are gone."""

    def __init__(self) -> None:
        self.world_size = 0
        """0 before the first has come."""
        self._seats: dict[int, Seat] = {}
        self._left: dict[int, bool] = {}
        """Ranks that said farewell, and whether they had done."""

    def sit(self, peer: bytes, rank: int, world_size: int, now_s: float) -> bool:
        """Give ``rank`` to this process; whether a new trainer begins with it.

        Raises:
            ConfigError: there can't be such a rank.
            SeatTaken: a living process has it, or the world is another as long as others live.
        """
        if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise ConfigError(
                f"rank={rank} of world_size={world_size}: ranks count from 0, and there are at "
                f"most {WORLD_SIZE_MAX}"
            )
        living = [s for s in self._seats.values() if s.peer != peer and self._lives(s, now_s)]
        if self.world_size not in (0, world_size) and living:
            raise SeatTaken(
                f"rank {living[0].rank} of {self.world_size} is still here, and this trainer says "
                f"world_size={world_size}; end the others first"
            )
        held = next((seat for seat in living if seat.rank == rank), None)
        if held is not None and world_size == self.world_size:
            raise SeatTaken(
                f"rank {rank} of {world_size} is held by a process that was heard "
                f"{now_s - held.heard_s:.1f} s ago; end it, or give this one another rank"
            )
        is_new = self.world_size != world_size or (not living and self.has_left_done)
        if is_new:
            self._seats, self._left, self.world_size = {}, {}, world_size
        self._left.pop(rank, None)
        self._seats[rank] = Seat(peer, rank, now_s)
        return is_new

    def heard(self, peer: bytes, now_s: float) -> Seat | None:
        """A process gave a sign of life; its seat, if it has one."""
        for seat in self._seats.values():
            if seat.peer == peer:
                seat.heard_s = now_s
                return seat
        return None

    def leave(self, peer: bytes, *, is_done: bool) -> int | None:
        """A process says farewell; the rank that it was."""
        for rank, seat in list(self._seats.items()):
            if seat.peer == peer:
                del self._seats[rank]
                self._left[rank] = is_done
                return rank
        return None

    @property
    def peers(self) -> list[bytes]:
        """Of all seats that are taken, heard of late or not."""
        return [seat.peer for seat in self._seats.values()]

    @property
    def has_left_done(self) -> bool:
        """Whether every rank has gone, having done."""
        return len(self._left) == self.world_size > 0 and all(self._left.values())

    def has_left(self, rank: int) -> bool:
        """Whether it said farewell."""
        return rank in self._left

    def is_done(self, rank: int) -> bool:
        """Whether it said so because it had done."""
        return self._left.get(rank, False)

    def silent_s(self, rank: int, now_s: float) -> float | None:
        """Since when nothing was heard of it; None: it has no seat."""
        seat = self._seats.get(rank)
        return None if seat is None else now_s - seat.heard_s

    def has_anybody(self, now_s: float, within_s: float) -> bool:
        """Whether a rank was heard lately."""
        return any(now_s - seat.heard_s < within_s for seat in self._seats.values())

    @staticmethod
    def _lives(seat: Seat, now_s: float) -> bool:
        return now_s - seat.heard_s < TAKEOVER_SILENCE_S
