"""How does an engine get weights by broadcast? It asks to be in the next round, and is overwritten.

It knows one sender; not who else is in a round.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import zmq

from tidegate.errors import BadFrame, ConfigError, WeightsRefused
from tidegate.transport.addresses import (
    at_host_of,
    check_connector,
    listening_host,
    own_address_towards,
)
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.security import secure_connector
from tidegate.transport.weight_channels.base import Home, views
from tidegate.transport.weight_channels.collective import (
    ATTEMPTS_MAX,
    PIECE_BYTES,
    POLL_S,
    ROUND_TIMEOUT_S,
    Join,
    Member,
    Round,
    decode_round,
    encode,
    open_store,
    own_gpu,
)
from tidegate.transport.zeromq import new_socket

ANSWER_TIMEOUT_S = 3 * ROUND_TIMEOUT_S
"""For a place in a round; one before it may fail slowly."""


LOOPBACK = "tcp://127.0.0.1:1"
"""Where groups meet if the sender is reached by a path."""


class CollectiveReceiver:
    """A socket to the sender, a place in its group, and the buffer; for one thread."""

    def __init__(self, init: InitWeights, home: Home) -> None:
        """Connect to where ``init`` says, which need not answer yet.

        Raises:
            WeightsRefused: that is no place to connect to.
        """
        self._address = at_host_of(home.address, str(init.info.get("address")))
        try:
            check_connector(self._address, has_keys=home.keys is not None)
            own = own_address_towards(self._address)
        except ConfigError as error:
            raise WeightsRefused(f"weights are to come from a strange place: {error}") from error
        self._own_host = listening_host(own)
        self._gpu = own_gpu()
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._is_written_to = False
        """Whether some of a version given up may still come, into the buffer."""
        self._member: Member | None = None
        self._socket = new_socket(zmq.DEALER, self._address)
        self._socket.setsockopt(zmq.LINGER, 0)
        if home.keys is not None:
            secure_connector(self._socket, home.keys)
        self._socket.connect(self._address)
        self._socket.send(encode(Join("")))

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Views of the buffer, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        if nbytes > len(self._buffer) or self._is_written_to:
            self._is_written_to = False
            self._buffer = np.empty(nbytes, np.uint8)
        shown = views(update.tensors, self._buffer.data[:nbytes])
        return self._fetched(shown, _Arriving(update.location, nbytes), is_wanted)

    def close(self) -> None:
        """Leave. Harmless if repeated."""
        self._leave()
        self._socket.close()

    def _fetched(
        self,
        shown: Iterator[tuple[TensorSpec, memoryview]],
        arriving: "_Arriving",
        is_wanted: Callable[[], bool],
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        try:
            for spec, view in shown:
                while arriving.have_bytes < spec.offset + spec.nbytes:
                    if not is_wanted() or not self._advance(arriving, is_wanted):
                        return
                yield spec, view
            if not arriving.is_used_up:  # padding, which the others wait for us to take
                self._advance(arriving, is_wanted)
        finally:
            if not arriving.is_used_up:
                self._leave()
                self._socket.send(encode(Join("")))  # so that others go on without us

    def _advance(self, arriving: "_Arriving", is_wanted: Callable[[], bool]) -> bool:
        """Take one piece, in a round if need be; False if nobody wants it any more."""
        try:
            if arriving.round is None:
                arriving.round = self._asked(arriving, is_wanted)
                if arriving.round is None:
                    return False
                arriving.at = arriving.round.start
                self._join(arriving.round)
            assert self._member is not None
            end = min(arriving.at + PIECE_BYTES, arriving.round.nbytes)
            group, piece = arriving.round.group, self._buffer[arriving.at : end]
            if not self._member.broadcast(piece, lambda: is_wanted() and not self._is_over(group)):
                self._is_written_to = True
                if not is_wanted():
                    return False
                raise RuntimeError("another member has left")
            arriving.at = end
            arriving.have_bytes = max(arriving.have_bytes, end)
        except RuntimeError as error:
            self._leave()
            arriving.round = None
            arriving.attempts += 1
            if arriving.attempts == ATTEMPTS_MAX:
                raise WeightsRefused(
                    f"{ATTEMPTS_MAX} rounds of broadcasting weights have failed; the last: {error}"
                ) from error
        return True

    def _asked(self, arriving: "_Arriving", is_wanted: Callable[[], bool]) -> Round | None:
        """Ask for a place in a round, and wait for it; who takes none says so, for else the others
        wait for it in the round."""
        told = None
        self._socket.send(encode(Join(arriving.location, arriving.have_bytes, self._gpu)))
        try:
            told = self._answer(arriving, is_wanted)
        finally:
            if told is None:
                self._socket.send(encode(Join("")))
        return told

    def _answer(self, arriving: "_Arriving", is_wanted: Callable[[], bool]) -> Round | None:
        give_up_s = time.monotonic() + ANSWER_TIMEOUT_S
        while is_wanted():
            if self._socket.poll(round(POLL_S * 1000)):
                told = self._told(arriving)
                if told is not None:
                    return told
            elif time.monotonic() > give_up_s:
                raise WeightsRefused(
                    f"{self._address} has offered no round of weights for {ANSWER_TIMEOUT_S:g} s; "
                    f"is the orchestrator alive, and are this engine's keys allowed?"
                )
        return None

    def _told(self, arriving: "_Arriving") -> Round | None:
        try:
            told = decode_round(self._socket.recv_multipart()[0])
        except BadFrame as error:
            raise WeightsRefused(str(error)) from error
        if told.location != arriving.location or (told.size == 0 and not told.refusal):
            return None  # of an attempt given up
        if told.refusal:
            raise WeightsRefused(f"weights can't be fetched: {told.refusal}")
        if told.nbytes > len(self._buffer):
            raise WeightsRefused(
                f"{self._address} would send {told.nbytes} bytes of weights where the update has "
                f"{len(self._buffer)}"
            )
        return told

    def _is_over(self, group: str) -> bool:
        """Whether the sender has said that the round of this group has failed."""
        while self._socket.poll(0):
            with suppress(BadFrame):  # who asks again, and hears it then
                told = decode_round(self._socket.recv_multipart()[0])
                if told.group == group and told.size == 0:
                    return True
        return False

    def _join(self, round_: Round) -> None:
        if self._member is not None and self._member.name == round_.group:
            return
        self._leave()
        reached = self._address if self._address.startswith("tcp:") else LOOPBACK
        host, _, port = at_host_of(reached, round_.store)[6:].rpartition(":")
        store = partial(open_store, host.strip("[]"), int(port))
        self._member = Member(round_, store, own_host=self._own_host)

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


class _Arriving:
    """How much of one version is here, and the round that the rest comes in."""

    def __init__(self, location: str, nbytes: int) -> None:
        self.location = location
        self.nbytes = nbytes
        self.have_bytes = 0
        """From the beginning on."""
        self.round: Round | None = None
        self.at = 0
        """Where that round goes on."""
        self.attempts = 0

    @property
    def is_used_up(self) -> bool:
        """Whether the round, if there was one, is over."""
        return self.round is None or self.at >= self.round.nbytes
