"""Engine's end of the ``zmq`` weight channel: requests chunks ahead, into one buffer.

The buffer is reused for each version. Every wait is bounded: chunks lost with a connection are
requested again, and a sender that stays silent is an error.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.addresses import check_connector, resolve_wildcard_host
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.security import secure_connector
from tidegate.transport.weight_channels.base import WeightReceiverConfig, views
from tidegate.transport.weight_channels.transfer import (
    Transfer,
    keep_freed_chunks,
    receive_chunk,
)
from tidegate.transport.weight_channels.zmq import FetchRequest, encode
from tidegate.transport.zeromq import new_socket

STALL_TIMEOUT_S = 30.0
"""Timeout without a single chunk; 2 MiB take this long at half a megabit per second."""

POLL_S = 0.1
"""Polling interval for whether the weights are still wanted."""

_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ZmqReceiver:
    """A DEALER to one sender, and the buffer; for one thread."""

    def __init__(self, init: InitWeights, config: WeightReceiverConfig) -> None:
        """Connect to the address in ``init``, which need not answer yet.

        Raises:
            WeightsRefused: the address is invalid.
        """
        self._address = resolve_wildcard_host(config.address, str(init.info.get("address")))
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        try:
            check_connector(self._address, has_keys=config.keys is not None)
        except ConfigError as error:
            raise WeightsRefused(f"invalid address of the weight sender: {error}") from error
        self._socket = new_socket(zmq.DEALER, self._address)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, round(1000 * POLL_S))
        if config.keys is not None:
            secure_connector(self._socket, config.keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _REJECTED)
        self._connections = 0
        keep_freed_chunks()
        self._socket.connect(self._address)

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Yield views of the buffer, each as soon as it is complete."""
        nbytes = max((spec.offset + spec.nbytes for spec in update.tensors), default=0)
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, np.uint8)
        buffer = self._buffer.data[:nbytes]
        tensor_views = views(update.tensors, buffer)
        return self._fetched(tensor_views, Transfer(update.location, buffer), is_wanted)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _fetched(
        self,
        tensor_views: Iterator[tuple[TensorSpec, memoryview]],
        transfer: Transfer,
        is_wanted: Callable[[], bool],
    ) -> Iterator[tuple[TensorSpec, memoryview]]:
        self._send_requests(transfer.next_requests())
        for spec, view in tensor_views:
            while not transfer.has(spec.offset + spec.nbytes):
                if not self._receive(transfer, is_wanted):
                    return
                self._send_requests(transfer.next_requests())
            yield spec, view

    # ------------------------------------------------------------ the wire

    def _send_requests(self, requests: list[FetchRequest]) -> None:
        for request in requests:
            self._socket.send(encode(request))

    def _receive(self, transfer: Transfer, is_wanted: Callable[[], bool]) -> bool:
        """Wait for one chunk of this transfer; False if the weights are no longer wanted."""
        deadline_s = time.monotonic() + STALL_TIMEOUT_S
        while is_wanted():
            try:
                if receive_chunk(self._socket, transfer, self._address, flags=0) is not None:
                    return True
            except zmq.Again:
                self._resend_if_reconnected(transfer)
                if time.monotonic() > deadline_s:
                    raise WeightsRefused(
                        f"no weights arrived from {self._address} for {STALL_TIMEOUT_S:g} s, with "
                        f"{transfer.missing_bytes} bytes missing; is the orchestrator "
                        f"alive, and does a firewall let this host reach that port?"
                    ) from None
        return False

    def _resend_if_reconnected(self, transfer: Transfer) -> None:
        """Repeat the outstanding requests, which a broken connection has lost."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event & _REJECTED:
                raise WeightsRefused(
                    f"{self._address} rejected this engine's keys; copy the directory that "
                    f"`tidegate keys` made for engines from that orchestrator's host"
                )
            self._connections += 1
            if self._connections > 1:
                self._send_requests(transfer.outstanding())
