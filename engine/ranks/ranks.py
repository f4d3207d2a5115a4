"""What does an engine need to have several ranks? Their start, their meeting, and their end.

An engine of one rank has nothing of it: no process, no sums, the same runner and staging as ever.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidegate.engine.memory.sleep import Memory, Sleeper, Turns
from tidegate.engine.ranks.shards import Shard
from tidegate.engine.runner import ModelRunner, Runner
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ConfigError
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.rank_messages import Connect
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import CHANNELS, Home

if TYPE_CHECKING:  # torch.distributed is for engines of several ranks
    from tidegate.engine.ranks.rank_group import RankGroup
    from tidegate.engine.ranks.team import Team

RANKS_MAX = 64
"""On one machine there are not more processors worth it."""

ONE_READER_CHANNELS = ("relay", "collective")
"""They count on one reader per engine, and of several ranks each reads for itself."""


def ranks_channels(count: int) -> list[str]:
    """The weight channels of an engine with so many ranks."""
    return [name for name in CHANNELS if count == 1 or name not in ONE_READER_CHANNELS]


class Ranks:
    """The ranks of one engine, as rank 0 has them."""

    def __init__(self, count: int, *, is_deterministic: bool = False) -> None:
        """Make what the model is opened with.

        Raises:
            ConfigError: there can't be so many.
        """
        if not 1 <= count <= RANKS_MAX:
            raise ConfigError(f"tensor_parallel must be 1 to {RANKS_MAX}, got {count}")
        if is_deterministic and count > 2:
            raise ConfigError(
                f"deterministic: sums over {count} ranks depend on the batch, those over 2 don't; "
                f"set tensor_parallel to 2 or 1, or leave deterministic out"
            )
        self.shard = Shard(0, count)
        self.group: RankGroup | None = None
        self._team: Team | None = None
        self._directory: PrivateDirectory | None = None
        if count > 1:
            from tidegate.engine.ranks import rank_group

            self._directory = PrivateDirectory("ranks")
            self.group = rank_group.RankGroup(0, count, self._directory.path / "meeting")

    def start(self, arguments: Sequence[str]) -> None:
        """Start the other ranks, which load their part of the model."""
        if self.shard.is_whole or self._directory is None:
            return
        from tidegate.engine.ranks.team import start_team

        meeting_place = self._directory.path / "meeting"
        self._team = start_team(self.shard.ranks, [*arguments, f"--meeting-place={meeting_place}"])

    def lead(self, runner: Runner, keys: EngineKeys | None) -> Runner:
        """Wait until all ranks have loaded; what runs steps on all of them.

        ``keys`` are what they fetch weights by, as this one does.

        Raises:
            RankLost: one ended before it had.
        """
        if self._team is None or self.group is None:
            return runner
        from tidegate.engine.ranks.ranked_runner import RankedRunner

        assert isinstance(runner, ModelRunner)  # models of others are refused
        told = None if keys is None else (keys.public, keys.secret, keys.orchestrator)
        self._team.wait_loaded(Connect(told))
        self.group.connect()
        return RankedRunner(runner, self._team)

    def staging(self, allocate: Callable[[], WeightStore], home: Home) -> Staging:
        """What stages weights on all of them."""
        if self._team is None:
            return Staging(allocate, home)
        from tidegate.engine.ranks.ranked_staging import RankedStaging

        return RankedStaging(allocate, self._team, home)

    def sleeper(
        self,
        runner: Runner,
        staging: Staging,
        turns: Turns,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        memory: Memory | None = None,
    ) -> Sleeper:
        """What gives memory back on all of them; ``memory`` is as the sleeper's, of one rank."""
        if self._team is None:
            return Sleeper(runner, staging, turns, reload=reload, memory=memory)
        from tidegate.engine.ranks.ranked_sleep import RankedSleeper

        return RankedSleeper(runner, staging, turns, reload=reload, team=self._team)

    def close(self) -> None:
        """End the other ranks. Harmless if repeated."""
        if self._team is not None:
            self._team.close()
            self._team = None
        if self._directory is not None:
            self._directory.remove()
