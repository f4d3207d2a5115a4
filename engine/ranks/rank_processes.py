"""Processes of the ranks other than 0: start, pipe messages, loss detection and shutdown.

A rank that ends is noticed at the next message to or from that rank. An engine that loses a rank
ends, because every rank holds a part of all turns' KV.
"""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Protocol

from tidegate.errors import RankLost
from tidegate.transport import rank_messages as rank

STOP_TIMEOUT_S = 5.0
"""Seconds from closing a rank's connection to killing its process."""

FAILURE_REPORT_TIMEOUT_S = 1.0
"""Seconds to wait for a failing rank's report."""

START_TIMEOUT_S = 600.0
"""Seconds to load a rank's part of the model; a rank that dies is noticed at once."""

MEMORY_TIMEOUT_S = 600.0
"""Seconds to copy a rank's weights to or from disk."""

MEMORY_POLL_S = 0.1
"""Seconds between two heartbeats during these copies."""


class Process(Protocol):
    """Process of a rank, as ``subprocess.Popen``."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait until the process has ended.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """

    def kill(self) -> None:
        """Kill the process."""


class RankProcesses:
    """The other ranks, and rank 0's connections to them."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[Process]) -> None:
        """Connections and processes of ranks 1, 2, ..., in order."""
        self._connections = connections
        self._processes = processes
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.fileno(), select.POLLIN)
        self._staged: list[tuple[int, rank.RankStaged]] = []
        """Staging reports that arrived during the wait for a sleep or wake reply."""
        self._ranks = {
            connection.fileno(): rank_number + 1
            for rank_number, connection in enumerate(connections)
        }

    @property
    def ranks(self) -> int:
        """Number of ranks, rank 0 included."""
        return len(self._connections) + 1

    def wait_loaded(self, connect: rank.InitProcessGroup | None = None) -> None:
        """Wait until all ranks have loaded, then have them connect to each other.

        Raises:
            RankLost: a rank ended, or took longer than ``START_TIMEOUT_S``.
        """
        for number, connection in enumerate(self._connections, start=1):
            if not connection.poll(START_TIMEOUT_S):
                raise self._lost(
                    number, f"rank {number} has not loaded within {START_TIMEOUT_S:.0f} s"
                )
            self._receive(number)
        self.broadcast(connect or rank.InitProcessGroup())

    def broadcast(self, message: rank.ToRank) -> None:
        """Send a message to all ranks.

        Raises:
            RankLost: a rank is gone.
        """
        frame = rank.encode(message)
        for number, connection in enumerate(self._connections, start=1):
            try:
                connection.send_bytes(frame)
            except OSError as error:
                raise self.lost_rank_error(f"rank {number}: {error}") from error

    def take_staged(self) -> list[tuple[int, rank.RankStaged]]:
        """Return the staging reports since the last call, each with its rank.

        Raises:
            RankLost: a rank is gone.
        """
        reports, self._staged = self._staged, []
        while ready := self._poll.poll(0):
            for fd, _ in ready:
                message = self._receive(self._ranks[fd])
                if isinstance(message, rank.RankStaged):
                    reports.append((self._ranks[fd], message))
        return reports

    def await_memory(self, heartbeat: Callable[[], None]) -> list[rank.RankMemory]:
        """Return every rank's reply to a sleep or wake, in order, calling ``heartbeat`` while
        waiting.

        Raises:
            RankLost: a rank is gone, or took longer than ``MEMORY_TIMEOUT_S``.
        """
        replies: list[rank.RankMemory] = []
        for number, connection in enumerate(self._connections, start=1):
            deadline_s = time.monotonic() + MEMORY_TIMEOUT_S
            while len(replies) < number:
                heartbeat()
                if connection.poll(MEMORY_POLL_S):
                    message = self._receive(number)
                    if isinstance(message, rank.RankMemory):
                        replies.append(message)
                    elif isinstance(message, rank.RankStaged):
                        self._staged.append((number, message))
                elif time.monotonic() > deadline_s:
                    why = f"rank {number} did not sleep or wake within {MEMORY_TIMEOUT_S:.0f} s"
                    raise self._lost(number, why)
        return replies

    def lost_rank_error(self, why: str) -> RankLost:
        """Return the error for a failed collective or send: the rank's own report, if any."""
        for number, connection in enumerate(self._connections, start=1):
            try:
                while connection.poll(FAILURE_REPORT_TIMEOUT_S):
                    self._receive(number)
            except RankLost as lost:
                return lost
        return self._lost(0, why)

    def close(self) -> None:
        """Stop all processes, and wait for their end."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _receive(self, number: int) -> rank.FromRank:
        try:
            message = rank.decode_from_rank(self._connections[number - 1].recv_bytes())
        except (EOFError, OSError):
            raise self._lost(number, f"rank {number} ended") from None
        if isinstance(message, rank.RankFailed):
            raise self._lost(number, f"rank {number} failed: {message.message}")
        return message

    def _lost(self, number: int, why: str) -> RankLost:
        return RankLost(rank=number, ranks=self.ranks, why=why)


def start_ranks(ranks: int, arguments: Sequence[str]) -> RankProcesses:
    """Start the processes of ranks 1 to ``ranks`` - 1, all with ``arguments``."""
    connections: list[Connection] = []
    processes: list[Process] = []
    for number in range(1, ranks):
        own_end, rank_end = Pipe()
        fd = rank_end.fileno()
        command = [sys.executable, "-m", "tidegate.engine.ranks.worker"]
        command += [f"--rank={number}", f"--ranks={ranks}", f"--connection={fd}", *arguments]
        with contextlib.closing(rank_end):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
        connections.append(own_end)
        processes.append(process)
    return RankProcesses(connections, processes)
