"""How does rank 0 of an engine lead the others? It starts them, and tells them all alike.

It knows nothing of what they are told. A rank that ends is noticed at the next word to or from it;
an engine without one of its ranks ends, for every rank holds a part of all its turns' KV.
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
"""After its connection is closed, a process has so long before it is killed."""

LAST_WORD_S = 1.0
"""How long a rank that fails has to say why."""

START_TIMEOUT_S = 600.0
"""To load its part of a model. One that dies before is noticed at once."""

MEMORY_TIMEOUT_S = 600.0
"""To copy its weights to a disk, or from it."""

MEMORY_POLL_S = 0.1
"""Between two beats meanwhile."""


class Process(Protocol):
    """What a rank runs in."""

    def wait(self, timeout: float | None = None) -> object:
        """Until it has ended.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """

    def kill(self) -> None:
        """End it now."""


class Team:
    """The other ranks, as rank 0 knows them."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[Process]) -> None:
        """One of each for rank 1, 2, ..."""
        self._connections = connections
        self._processes = processes
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection.fileno(), select.POLLIN)
        self._staged: list[tuple[int, rank.RankStaged]] = []
        """What was said of staging while something else was waited for."""
        self._ranks = {connection.fileno(): n + 1 for n, connection in enumerate(connections)}

    @property
    def ranks(self) -> int:
        """How many there are, rank 0 among them."""
        return len(self._connections) + 1

    def wait_loaded(self, connect: rank.Connect | None = None) -> None:
        """Return once all have loaded their part, and told them to meet.

        Raises:
            RankLost: one ended before, or takes for ever.
        """
        for number, connection in enumerate(self._connections, start=1):
            if not connection.poll(START_TIMEOUT_S):
                raise self._lost(number, f"rank {number} loads for {START_TIMEOUT_S:.0f} s")
            self._receive(number)
        self.tell(connect or rank.Connect())

    def tell(self, message: rank.ToRank) -> None:
        """Say something to all.

        Raises:
            RankLost: one is gone.
        """
        frame = rank.encode(message)
        for number, connection in enumerate(self._connections, start=1):
            try:
                connection.send_bytes(frame)
            except OSError as error:
                raise self.blame(f"rank {number}: {error}") from error

    def heard(self) -> list[tuple[int, rank.RankStaged]]:
        """What ranks have said since, each with who said it.

        Raises:
            RankLost: one is gone.
        """
        said, self._staged = self._staged, []
        while ready := self._poll.poll(0):
            for fd, _ in ready:
                message = self._receive(self._ranks[fd])
                if isinstance(message, rank.RankStaged):
                    said.append((self._ranks[fd], message))
        return said

    def await_memory(self, beat: Callable[[], None]) -> list[rank.RankMemory]:
        """Every rank's answer to a sleep or a wake, in their order; ``beat`` is called meanwhile.

        Raises:
            RankLost: one is gone, or takes for ever.
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
        """The error of a sum that failed, or of a word that nobody took: the rank's own, if any."""
        for number, connection in enumerate(self._connections, start=1):
            try:
                while connection.poll(LAST_WORD_S):
                    self._receive(number)
            except RankLost as lost:
                return lost
        return self._lost(0, why)

    def close(self) -> None:
        """End the others, and wait for it."""
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


def start_team(ranks: int, arguments: Sequence[str]) -> Team:
    """Start the processes of ranks 1 to ``ranks`` - 1; ``arguments`` are of all of them."""
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
    return Team(connections, processes)
