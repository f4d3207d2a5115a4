"""Engine's end of the ``collective`` weight channel: joins rounds, receives into a buffer.

:mod:`collective` describes the protocol; the receiver knows the sender, not the other members.
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
from tidegate.transport.weight_channels.base import WeightReceiverConfig, views
from tidegate.transport.weight_channels.collective import (
    ATTEMPTS_MAX,
    PIECE_BYTES,
    POLL_S,
    ROUND_TIMEOUT_S,
    BroadcastMember,
    RoundAssignment,
    RoundRequest,
    decode_round_assignment,
    encode,
    open_store,
    own_gpu,
)
from tidegate.transport.zeromq import new_socket

ANSWER_TIMEOUT_S = 3 * ROUND_TIMEOUT_S
"""Timeout for a place in a round; an earlier round may take long to fail."""


LOOPBACK = "tcp://127.0.0.1:1"
"""Fallback address of the store if the sender is reached by an ipc path."""


class CollectiveReceiver:
    """A socket to the sender, a membership in its group, and the buffer; for one thread."""

    def __init__(self, init: InitWeights, home: WeightReceiverConfig) -> None:
        """Connect to the address in ``init``, which need not answer yet.

        Raises:
            WeightsRefused: the address is invalid.
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
        """Whether an abandoned broadcast may still write to the buffer."""
        self._member: BroadcastMember | None = None
        self._socket = new_socket(zmq.DEALER, self._address)
        self._socket.setsockopt(zmq.LINGER, 0)
        if home.keys is not None:
            secure_connector(self._socket, home.keys)
        self._socket.connect(self._address)
        self._socket.send(encode(RoundRequest("")))

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield views of the buffer, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        if nbytes > len(self._buffer) or self._is_written_to:
            self._is_written_to = False
            self._buffer = np.empty(nbytes, np.uint8)
        shown = views(update.tensors, self._buffer.data[:nbytes])
        return self._fetched(shown, _Arriving(update.location, nbytes), is_wanted)

    def close(self) -> None:
        """Leave the group and close the socket. Idempotent."""
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
            # trailing padding; the other members wait for us to receive it
            if not arriving.is_used_up:
                self._advance(arriving, is_wanted)
        finally:
            if not arriving.is_used_up:
                self._leave()
                self._socket.send(encode(RoundRequest("")))  # lets the others continue without us

    def _advance(self, arriving: "_Arriving", is_wanted: Callable[[], bool]) -> bool:
        """Receive one piece, joining a round if needed; False if the weights are no longer
        wanted."""
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

    def _asked(
        self, arriving: "_Arriving", is_wanted: Callable[[], bool]
    ) -> RoundAssignment | None:
        """Request a place in a round and wait for it. If none is taken, tell the sender, because
        the other members would wait."""
        told = None
        self._socket.send(encode(RoundRequest(arriving.location, arriving.have_bytes, self._gpu)))
        try:
            told = self._answer(arriving, is_wanted)
        finally:
            if told is None:
                self._socket.send(encode(RoundRequest("")))
        return told

    def _answer(
        self, arriving: "_Arriving", is_wanted: Callable[[], bool]
    ) -> RoundAssignment | None:
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

    def _told(self, arriving: "_Arriving") -> RoundAssignment | None:
        try:
            told = decode_round_assignment(self._socket.recv_multipart()[0])
        except BadFrame as error:
            raise WeightsRefused(str(error)) from error
        if told.location != arriving.location or (told.world_size == 0 and not told.refusal):
            return None  # answer to an abandoned attempt
        if told.refusal:
            raise WeightsRefused(f"weights can't be fetched: {told.refusal}")
        if told.nbytes > len(self._buffer):
            raise WeightsRefused(
                f"{self._address} would send {told.nbytes} bytes of weights where the update has "
                f"{len(self._buffer)}"
            )
        return told

    def _is_over(self, group: str) -> bool:
        """Return whether the sender has reported that this group's round has failed."""
        while self._socket.poll(0):
            with suppress(BadFrame):  # an unreadable frame is ignored; the request is repeated
                told = decode_round_assignment(self._socket.recv_multipart()[0])
                if told.group == group and told.world_size == 0:
                    return True
        return False

    def _join(self, round_: RoundAssignment) -> None:
        if self._member is not None and self._member.name == round_.group:
            return
        self._leave()
        reached = self._address if self._address.startswith("tcp:") else LOOPBACK
        host, _, port = at_host_of(reached, round_.store)[6:].rpartition(":")
        store = partial(open_store, host.strip("[]"), int(port))
        self._member = BroadcastMember(round_, store, own_host=self._own_host)

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


class _Arriving:
    """Progress of one version's transfer, and its current round."""

    def __init__(self, location: str, nbytes: int) -> None:
        self.location = location
        self.nbytes = nbytes
        self.have_bytes = 0
        """Number of leading bytes that are complete."""
        self.round: RoundAssignment | None = None
        self.at = 0
        """Offset at which the round continues."""
        self.attempts = 0

    @property
    def is_used_up(self) -> bool:
        """Whether the current round, if any, has sent all its bytes."""
        return self.round is None or self.at >= self.round.nbytes
