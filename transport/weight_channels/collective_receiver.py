"""Engine's end of the ``collective`` weight channel: joins rounds, receives into a buffer.

For the engine's staging thread. Requests a version over ZeroMQ and receives it through
torch.distributed. :mod:`collective_rounds` describes the protocol; the receiver connects to the
sender only, not to the other members.
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
    listening_host,
    local_address_towards,
    resolve_wildcard_host,
)
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.security import secure_connector
from tidegate.transport.weight_channels.base import (
    WeightReceiverConfig,
    decode,
    encode,
    sender_address,
    views,
)
from tidegate.transport.weight_channels.collective_rounds import (
    ATTEMPTS_MAX,
    PIECE_BYTES,
    POLL_S,
    ROUND_TIMEOUT_S,
    BroadcastMember,
    RoundAssignment,
    RoundRequest,
    open_store,
    own_gpu,
)
from tidegate.transport.zeromq import new_socket

ANSWER_TIMEOUT_S = 3 * ROUND_TIMEOUT_S
"""Timeout for a round assignment; an earlier round may take long to fail."""


LOOPBACK = "tcp://127.0.0.1:1"
"""Fallback address of the store if the sender is reached by an ipc path."""


class CollectiveReceiver:
    """A socket to the sender, a membership in its group, and the buffer; for one thread."""

    def __init__(self, init: InitWeights, config: WeightReceiverConfig) -> None:
        """Connect to the address in ``init``, which need not answer yet.

        Raises:
            WeightsRefused: the address is invalid.
        """
        self._address = sender_address(init, config)
        try:
            own = local_address_towards(self._address)
        except ConfigError as error:
            raise WeightsRefused(f"invalid address of the weight sender: {error}") from error
        self._own_host = listening_host(own)
        self._gpu = own_gpu()
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._is_buffer_in_use = False
        """Whether an abandoned broadcast may still write to the buffer."""
        self._member: BroadcastMember | None = None
        self._socket = new_socket(zmq.DEALER, self._address)
        self._socket.setsockopt(zmq.LINGER, 0)
        if config.keys is not None:
            secure_connector(self._socket, config.keys)
        self._socket.connect(self._address)
        self._socket.send(encode(RoundRequest("")))

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield views of the buffer, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        if nbytes > len(self._buffer) or self._is_buffer_in_use:
            self._is_buffer_in_use = False
            self._buffer = np.empty(nbytes, np.uint8)
        tensor_views = views(update.tensors, self._buffer.data[:nbytes])
        return self._fetched(tensor_views, _RoundTransfer(update.location, nbytes), is_wanted)

    def close(self) -> None:
        """Leave the group and close the socket. Idempotent."""
        self._leave()
        self._socket.close()

    def _fetched(
        self,
        tensor_views: Iterator[tuple[TensorSpec, memoryview]],
        transfer: "_RoundTransfer",
        is_wanted: Callable[[], bool],
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        try:
            for spec, view in tensor_views:
                while transfer.complete_bytes < spec.offset + spec.nbytes:
                    if not is_wanted() or not self._advance(transfer, is_wanted):
                        return
                yield spec, view
            # trailing padding; the other members wait for us to receive it
            if not transfer.is_round_done:
                self._advance(transfer, is_wanted)
        finally:
            if not transfer.is_round_done:
                self._leave()
                self._socket.send(
                    encode(RoundRequest(""))
                )  # so that the other members continue without this engine

    def _advance(self, transfer: "_RoundTransfer", is_wanted: Callable[[], bool]) -> bool:
        """Receive one piece, joining a round if needed; False if the weights are no longer
        wanted."""
        try:
            if transfer.round is None:
                transfer.round = self._request_round(transfer, is_wanted)
                if transfer.round is None:
                    return False
                transfer.offset = transfer.round.start
                self._join(transfer.round)
            assert self._member is not None
            end = min(transfer.offset + PIECE_BYTES, transfer.round.nbytes)
            group, piece = transfer.round.group, self._buffer[transfer.offset : end]
            if not self._member.broadcast(
                piece, lambda: is_wanted() and not self._has_failed(group)
            ):
                self._is_buffer_in_use = True
                if not is_wanted():
                    return False
                raise RuntimeError("another member left the round")
            transfer.offset = end
            transfer.complete_bytes = max(transfer.complete_bytes, end)
        except RuntimeError as error:
            self._leave()
            transfer.round = None
            transfer.attempts += 1
            if transfer.attempts == ATTEMPTS_MAX:
                raise WeightsRefused(
                    f"{ATTEMPTS_MAX} broadcasts of these weights have failed, the last because: "
                    f"{error}. Check the network between the hosts, or set weight_channel to 'zmq'"
                ) from error
        return True

    def _request_round(
        self, transfer: "_RoundTransfer", is_wanted: Callable[[], bool]
    ) -> RoundAssignment | None:
        """Request a round and wait for the assignment. If none is accepted, withdraw the request,
        because the other members would wait."""
        assignment = None
        self._socket.send(
            encode(RoundRequest(transfer.location, transfer.complete_bytes, self._gpu))
        )
        try:
            assignment = self._wait_for_round(transfer, is_wanted)
        finally:
            if assignment is None:
                self._socket.send(encode(RoundRequest("")))
        return assignment

    def _wait_for_round(
        self, transfer: "_RoundTransfer", is_wanted: Callable[[], bool]
    ) -> RoundAssignment | None:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while is_wanted():
            if self._socket.poll(round(POLL_S * 1000)):
                assignment = self._read_assignment(transfer)
                if assignment is not None:
                    return assignment
            elif time.monotonic() > deadline_s:
                raise WeightsRefused(
                    f"{self._address} has offered no round of weights for {ANSWER_TIMEOUT_S:g} s; "
                    f"is the orchestrator alive, and are this engine's keys allowed?"
                )
        return None

    def _read_assignment(self, transfer: "_RoundTransfer") -> RoundAssignment | None:
        try:
            assignment = decode(self._socket.recv_multipart()[0], RoundAssignment)
        except BadFrame as error:
            raise WeightsRefused(str(error)) from error
        if assignment.location != transfer.location or (
            assignment.world_size == 0 and not assignment.refusal
        ):
            return None  # answer to an abandoned attempt
        if assignment.refusal:
            raise WeightsRefused(f"weights can't be fetched: {assignment.refusal}")
        if assignment.nbytes > len(self._buffer):
            raise WeightsRefused(
                f"{self._address} would send {assignment.nbytes} bytes of weights where the update "
                f"has {len(self._buffer)}"
            )
        return assignment

    def _has_failed(self, group: str) -> bool:
        """Return whether the sender has reported that this group's round has failed."""
        while self._socket.poll(0):
            with suppress(BadFrame):  # an unreadable frame is ignored; the request is repeated
                assignment = decode(self._socket.recv_multipart()[0], RoundAssignment)
                if assignment.group == group and assignment.world_size == 0:
                    return True
        return False

    def _join(self, round_: RoundAssignment) -> None:
        if self._member is not None and self._member.name == round_.group:
            return
        self._leave()
        reached = self._address if self._address.startswith("tcp:") else LOOPBACK
        host, _, port = resolve_wildcard_host(reached, round_.store)[6:].rpartition(":")
        store = partial(open_store, host.strip("[]"), int(port))
        self._member = BroadcastMember(round_, store, own_host=self._own_host)

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


class _RoundTransfer:
    """Progress of one version's transfer, and its current round."""

    def __init__(self, location: str, nbytes: int) -> None:
        self.location = location
        self.nbytes = nbytes
        self.complete_bytes = 0
        """Number of leading bytes that are complete."""
        self.round: RoundAssignment | None = None
        self.offset = 0
        """Offset at which the round continues."""
        self.attempts = 0

    @property
    def is_round_done(self) -> bool:
        """Whether the current round, if any, has sent all its bytes."""
        return self.round is None or self.offset >= self.round.nbytes
