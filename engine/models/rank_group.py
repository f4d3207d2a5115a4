"""How are tensors summed and joined over an engine's ranks? By gloo, on the loopback.

It knows nothing of models. Nothing here waits without end: a rank that is gone or stuck makes the
others fail, and an engine that has lost a rank has lost its turns' KV anyway.

The group belongs to its object, not to the process: so an engine and its trainer may each have
theirs, and tests have several.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tidegate.errors import RankLost

_distributed: Any = torch.distributed  # whose stubs know nothing of its gloo

TIMEOUT_S = 30.0
"""Of one sum. Ranks are at most one layer apart; also the longest step's takes a second or so."""


class RankGroup:
    """One rank's end. Every rank makes the same calls, in the same order."""

    def __init__(self, rank: int, ranks: int, meeting_place: Path) -> None:
        """``meeting_place`` is a file that isn't there yet, in a directory of this user's alone."""
        self.rank = rank
        self.ranks = ranks
        self._meeting_place = meeting_place
        self._group: Any = None

    def connect(self, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the others.

        Raises:
            RankLost: not all came.
        """
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        # Not what the host's name resolves to: nobody but this machine may join in.
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            store = _distributed.FileStore(str(self._meeting_place), self.ranks)
            self._group = gloo(store, self.rank, self.ranks, options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def sum_(self, x: torch.Tensor) -> None:
        """Add up what the ranks have, in place; all get the same bits.

        Raises:
            RankLost: one is gone, or doesn't answer.
        """
        try:
            self._connected().allreduce([x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """What the ranks have [S, n], side by side: [S, n * ranks].

        Raises:
            RankLost: one is gone, or doesn't answer.
        """
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        try:
            self._connected().allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=1)

    def _connected(self) -> Any:
        if self._group is None:
            raise AssertionError("connect first")
        return self._group

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(rank=self.rank, ranks=self.ranks, why=str(error).splitlines()[0])
