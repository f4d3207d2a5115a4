"""Collectives over an engine's tensor-parallel ranks: all-reduce and all-gather, with gloo.

Connections use the loopback. Every call has a timeout: if a rank is gone or stuck, the other ranks
fail, because a part of every turn's KV is lost with a rank. The process group belongs to its
object, not to the process, so an engine and its trainer may each have one.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tidegate.errors import RankLost

_distributed: Any = torch.distributed  # its stubs lack ProcessGroupGloo

TIMEOUT_S = 30.0
"""Seconds for one collective. Ranks are at most one layer apart; the longest step
takes about 1 s."""


class RankGroup:
    """One rank's end of the group. Every rank must make the same calls in the same order."""

    def __init__(self, rank: int, ranks: int, rendezvous_file: Path) -> None:
        """``rendezvous_file`` is a file that does not exist yet, in a directory
        private to this user."""
        self.rank = rank
        self.ranks = ranks
        self._rendezvous_file = rendezvous_file
        self._group: Any = None

    def connect(self, timeout_s: float = TIMEOUT_S) -> None:
        """Connect to the other ranks.

        Raises:
            RankLost: not all ranks connected in time.
        """
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        # Loopback rather than the host's address, so that only this machine can join.
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            store = _distributed.FileStore(str(self._rendezvous_file), self.ranks)
            self._group = gloo(store, self.rank, self.ranks, options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Sum ``x`` over the ranks in place (all-reduce); all ranks get the same bits.

        Raises:
            RankLost: a rank is gone or does not answer.
        """
        try:
            self._require_group().allreduce([x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' ``x`` [S, n] to [S, n * ranks] (all-gather).

        Raises:
            RankLost: a rank is gone or does not answer.
        """
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        try:
            self._require_group().allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=1)

    def _require_group(self) -> Any:
        if self._group is None:
            raise AssertionError("connect() was not called")
        return self._group

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(rank=self.rank, ranks=self.ranks, why=str(error).splitlines()[0])
