"""Engine's end of the ``relay`` weight channel: maps the weights that its host's relay fetches.

The first engine of a host to ask becomes that relay, in a thread (:mod:`relay_node`), and is its
own client. When the relay's process dies, another engine takes over with what it has mapped.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterator

from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import (
    WeightReceiverConfig,
    check_specs,
    decode,
    encode,
    sender_address,
)
from tidegate.transport.weight_channels.host_memory import (
    CONNECT_TIMEOUT_S,
    MESSAGE_BYTES_MAX,
    ReadOnlyHostMemory,
    connect,
    listen,
    retry_until,
)
from tidegate.transport.weight_channels.relay_messages import (
    STALL_TIMEOUT_S,
    LocationProgress,
    LocationRequest,
)
from tidegate.transport.weight_channels.relay_node import RelayBootstrap, RelayNode, Upstream

POLL_S = 0.1
"""Polling interval for whether the weights are still wanted."""

SILENT_MAX_S = 2 * STALL_TIMEOUT_S
"""Timeout without a message from this host's relay, whose own timeout is half as long."""


class RelayReceiver:
    """A connection to this host's relay, and the memory it shares; for one thread."""

    def __init__(self, init: InitWeights, config: WeightReceiverConfig) -> None:
        """Connect to the host's relay, or become it.

        Raises:
            WeightsRefused: the sender's address is invalid, or the relay belongs to another user.
        """
        self._upstream = Upstream.of(sender_address(init, config), init, config.keys)
        self._name = f"tidegate-weights-{init.info.get('sender')}{config.host}"
        self._node: RelayNode | None = None
        self._memory: ReadOnlyHostMemory | None = None
        self._location = ""
        """Location that the memory holds, or will hold."""
        self._nbytes = 0
        """Total size of the location, in bytes."""
        self._ready_bytes = 0
        """Number of leading bytes that have arrived."""
        self._is_location_mapped = False
        """Whether the mapped memory is that of the wanted location."""
        self._link = self._connect_or_become_relay()

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield views of the host's memory, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        check_specs(update.tensors, nbytes)
        return self._fetched(update, nbytes, is_wanted)

    def close(self) -> None:
        """Disconnect; if this process is the host's relay, another engine takes over.
        Idempotent."""
        self._link.close()
        if self._node is not None:
            self._node.close()
            self._node = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _fetched(
        self, update: UpdateWeights, nbytes: int, is_wanted: Callable[[], bool]
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        self._location, self._nbytes = update.location, nbytes
        self._ready_bytes, self._is_location_mapped = 0, False
        self._send_request()
        for spec in update.tensors:
            end = spec.offset + spec.nbytes
            while not self._is_location_mapped or self._ready_bytes < end:
                if not self._wait_for_message(is_wanted):
                    return
            assert self._memory is not None
            yield spec, self._memory.buffer[spec.offset : end]

    # ------------------------------------------------------------ the host's relay

    def _send_request(self) -> None:
        try:
            self._link.send(encode(LocationRequest(self._location)))
        except OSError:
            self._fail_over()

    def _wait_for_message(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait for one message of the relay; False if the weights are no longer wanted."""
        deadline_s = time.monotonic() + SILENT_MAX_S
        while is_wanted():
            if select.select([self._link], [], [], POLL_S)[0]:
                self._receive_message()
                return True
            if time.monotonic() > deadline_s:
                raise WeightsRefused(
                    "the engine that fetches weights for this host has sent nothing for "
                    f"{SILENT_MAX_S:g} s; is its process stopped?"
                )
        return False

    def _receive_message(self) -> None:
        try:
            frame, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES_MAX, 1)
        except OSError:
            frame, fds = b"", []
        if not frame:
            self._fail_over()
            return
        try:
            progress = decode(frame, LocationProgress)
        except BadFrame as error:
            raise WeightsRefused(str(error)) from error
        if progress.location != self._location:
            for fd in fds:
                os.close(fd)
            return
        self._handle_progress(progress, fds)

    def _handle_progress(self, progress: LocationProgress, fds: list[int]) -> None:
        if progress.refusal:
            raise WeightsRefused(f"weights can't be fetched: {progress.refusal}")
        for fd in fds:
            self._map(fd)
        self._ready_bytes = progress.ready_bytes

    def _map(self, fd: int) -> None:
        """Map the memory of the location, unless it is mapped already."""
        previous = self._memory
        if (
            previous is not None
            and previous.inode == os.fstat(fd).st_ino
            and previous.nbytes >= self._nbytes
        ):
            os.close(fd)
        else:
            if previous is not None:
                previous.close()
            self._memory = ReadOnlyHostMemory(fd)
            if self._memory.nbytes < self._nbytes:
                raise WeightsRefused(
                    f"this host's relay has {self._memory.nbytes} bytes of {self._location!r} "
                    f"where the update has {self._nbytes}"
                )
        self._is_location_mapped = True

    def _fail_over(self) -> None:
        """Fail over: connect to the next relay, or become it, seeded with the mapped memory."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            self._link.close()
            self._link = self._connect_or_become_relay()
            try:
                self._link.send(encode(LocationRequest(self._location)))
                return
            except OSError:  # that relay's process ended too, just after it was connected to
                if not retry_until(deadline_s):
                    raise self._no_relay() from None

    def _connect_or_become_relay(self) -> socket.socket:
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            listener = listen(self._name)
            if listener is not None:
                if self._node is not None:
                    self._node.close()
                self._node = RelayNode(self._upstream, listener, self._bootstrap())
            link = connect(self._name)
            if link is not None:
                return link
            if not retry_until(deadline_s):
                raise self._no_relay()

    def _no_relay(self) -> WeightsRefused:
        return WeightsRefused(f"this host's relay of weights, {self._name!r}, takes no connections")

    def _bootstrap(self) -> RelayBootstrap | None:
        """Return what a new relay can start with."""
        if self._memory is None or not self._is_location_mapped:
            return None
        return RelayBootstrap(self._location, os.dup(self._memory.fd), self._ready_bytes)
