"""Processes of the ranks other than 0: start, pipe messages, loss detection and shutdown.

Used by ``Ranks`` and the ranked staging and sleeper. A rank that ends is noticed at the next
message to or from it. An engine that loses a rank ends, because every rank holds a part of all
turns' KV.
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

LAST_WORD_S = 1.0
"""Seconds that a failing rank has to report why."""

START_TIMEOUT_S = 600.0
"""Seconds to load a rank's part of the model; a rank that dies is noticed at once."""

MEMORY_TIMEOUT_S = 600.0
"""Seconds to copy a rank's weights to or from disk."""

MEMORY_POLL_S = 0.1
"""Seconds between two heartbeats meanwhile."""


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
        """Staging reports that arrived while another answer was awaited."""
        self._ranks = {connection.fileno(): n + 1 for n, connection in enumerate(connections)}

    @property
    def ranks(self) -> int:
        """Number of ranks, rank 0 included."""
        return len(self._connections) + 1

    def wait_loaded(self, connect: rank.InitProcessGroup | None = None) -> None:
        """Wait until all ranks have loaded, then tell them to connect to each other.

        Raises:
            RankLost: a rank ended, or took longer than ``START_TIMEOUT_S``.
        """
        for number, connection in enumerate(self._connections, start=1):
            if not connection.poll(START_TIMEOUT_S):
                raise self._lost(number, f"rank {number} loads for {START_TIMEOUT_S:.0f} s")
            self._receive(number)
        self.tell(connect or rank.InitProcessGroup())

    def tell(self, message: rank.ToRank) -> None:
        """Send a message to all ranks.

        Raises:
            RankLost: a rank is gone.
        """
        frame = rank.encode(message)
        for number, connection in enumerate(self._connections, start=1):
            try:
                connection.send_bytes(frame)
            except OSError as error:
                raise self.blame(f"rank {number}: {error}") from error

    def heard(self) -> list[tuple[int, rank.RankStaged]]:
        """Return the staging reports since the last call, each with its rank.

        Raises:
            RankLost: a rank is gone.
        """
        said, self._staged = self._staged, []
        while ready := self._poll.poll(0):
            for fd, _ in ready:
                message = self._receive(self._ranks[fd])
                if isinstance(message, rank.RankStaged):
                    said.append((self._ranks[fd], message))
        return said

    def await_memory(self, beat: Callable[[], None]) -> list[rank.RankMemory]:
        """Return every rank's answer to a sleep or wake, in order, calling ``beat`` meanwhile.

        Raises:
            RankLost: a rank is gone, or took longer than ``MEMORY_TIMEOUT_S``.
        """
        answers: list[rank.RankMemory] = []
        for number, connection in enumerate(self._connections, start=1):
            deadline_s = time.monotonic() + MEMORY_TIMEOUT_S
            while len(answers) < number:
                beat()
                if connection.poll(MEMORY_POLL_S):
                    message = self._receive(number)
                    if isinstance(message, rank.RankMemory):
                        answers.append(message)
                    elif isinstance(message, rank.RankStaged):
                        self._staged.append((number, message))
                elif time.monotonic() > deadline_s:
                    why = f"rank {number} moves its memory for {MEMORY_TIMEOUT_S:.0f} s"
                    raise self._lost(number, why)
        return answers

    def blame(self, why: str) -> RankLost:
        """Return the error for a failed collective or send: the rank's own report, if any."""
        for number, connection in enumerate(self._connections, start=1):
            try:
                while connection.poll(LAST_WORD_S):
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


def start_team(ranks: int, arguments: Sequence[str]) -> RankProcesses:
    """Start the processes of ranks 1 to ``ranks`` - 1, all with ``arguments``."""
    connections: list[Connection] = []
    processes: list[Process] = []
    for number in range(1, ranks):
        mine, theirs = Pipe()
        fd = theirs.fileno()
        command = [sys.executable, "-m", "tidegate.engine.ranks.worker"]
        command += [f"--rank={number}", f"--ranks={ranks}", f"--connection={fd}", *arguments]
        with contextlib.closing(theirs):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
        connections.append(mine)
        processes.append(process)
    return RankProcesses(connections, processes)
