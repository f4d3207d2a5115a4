"""Rank 0's side of tensor parallelism: starts the other ranks, and runs steps and updates on all.

Used by the worker. Rank 0 sends the others each step's rows, and samples; the ranks' parts are
combined by all-reduce in each layer. Each rank copies its part of new weights from the channel. If
one refuses a version, all do. All swap between the same two steps, because every rank receives
swaps and steps in one order. An engine of one rank uses plain ``Staging``, ``SleepController`` and
``Runner``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tidegate.engine.execution.runner import ModelRunner, Row, Runner, StepOutput
from tidegate.engine.execution.sleep import SchedulerControl, SleepableMemory, SleepController
from tidegate.engine.memory.out_of_memory import is_out_of_memory
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.ranks.rank_loop import rank_rows
from tidegate.engine.ranks.team import RankProcesses
from tidegate.engine.weights.staging import Live, Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ConfigError, RankLost
from tidegate.transport import rank_messages as rank
from tidegate.transport.messages import (
    InitWeights,
    Message,
    StartWeightUpdate,
    UpdateWeights,
    WeightsStaged,
)
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.rank_messages import InitProcessGroup, RunStep
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import CHANNELS, NOWHERE, WeightReceiverConfig

if TYPE_CHECKING:
    from tidegate.engine.models.rank_group import RankGroup


class MultiRankRunner(Runner):
    """Runs steps on rank 0 and all other ranks."""

    def __init__(self, runner: ModelRunner, team: RankProcesses) -> None:
        self._runner = runner
        self._team = team

    @property
    def num_blocks(self) -> int:
        """Number of blocks of each rank's KV cache."""
        return self._runner.num_blocks

    @property
    def block_tokens(self) -> int:
        """Number of positions in a block."""
        return self._runner.block_tokens

    @property
    def weights(self) -> WeightStore:
        """Rank 0's part of the live weights."""
        return self._runner.weights

    def swap(self, weights: WeightStore) -> None:
        """Use other weights from the next step on; the staging tells the other ranks."""
        self._runner.swap(weights)

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of rank 0's KV cache."""
        return self._runner.cache_tensors()

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run each row's tokens; sample after rows with ``sampling``, score rows with ``scoring``.

        Raises:
            RankLost: a rank is gone or stuck, or failed within a step, after which the ranks cannot
                be synchronised again.
        """
        if not rows:
            return self._runner.step(rows)
        self._team.tell(RunStep(rank_rows(rows)))
        try:
            return self._runner.step(rows)
        except RankLost as error:
            raise self._team.blame(str(error)) from error
        except Exception as error:
            why = f"a step of {len(rows)} turns failed: {type(error).__name__}: {error}"
            if is_out_of_memory(error):
                why = f"no memory for a step of {len(rows)} turns ({error})"
            raise RankLost(rank=0, ranks=self._team.ranks, why=why) from error


class MultiRankStaging(Staging):
    """Stages weights on rank 0 and all other ranks."""

    def __init__(
        self,
        allocate: Callable[[], WeightStore],
        team: RankProcesses,
        home: WeightReceiverConfig = NOWHERE,
    ) -> None:
        super().__init__(allocate, home)
        self._team = team
        self._attempt = 0
        """Number of updates started; answers to older ones are ignored."""
        self._unstaged: set[int] = set()
        """Ranks that have not reported the current update as complete."""
        self._staged: WeightsStaged | None = None
        """Rank 0's own answer, held back until all other ranks have answered."""

    @property
    def is_busy(self) -> bool:
        """Whether an answer may become due."""
        return super().is_busy or self._staged is not None

    def init(self, message: InitWeights) -> None:
        """Phase 1 on every rank: open the channel."""
        self._team.tell(rank.ForwardWeightMessage(message))
        super().init(message)

    def start(self, message: StartWeightUpdate, live: Live | None = None) -> None:
        """Phase 2 on every rank: begin a version."""
        self._attempt += 1
        self._unstaged = set(range(1, self._team.ranks))
        self._staged = None
        version = None if live is None else live.version
        self._team.tell(rank.ForwardWeightMessage(message, self._attempt, version))
        super().start(message, live)

    def update(self, message: UpdateWeights) -> None:
        """Phase 3 on every rank: copy tensors."""
        self._team.tell(rank.ForwardWeightMessage(message))
        super().update(message)

    def abandon(self) -> None:
        """Drop the current update, complete or not, on every rank."""
        self._team.tell(rank.AbortWeightUpdate())
        self._unstaged.clear()
        self._staged = None
        super().abandon()

    def give_up(self, why: str) -> bool:
        """Stop the current update on every rank; return whether this rank's buffer is unused."""
        self._team.tell(rank.AbortWeightUpdate(why))
        self._unstaged.clear()
        self._staged = None
        return super().give_up(why)

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete on every rank."""
        return super().is_staged(version) and not self._unstaged and self._staged is None

    def take_answers(self) -> list[Message]:
        """Return what has been staged on every rank, or failed on one, since the last call.

        Raises:
            RankLost: a rank is gone.
        """
        for number, answer in self._team.heard():
            if answer.attempt != self._attempt:
                continue
            self._unstaged.discard(number)
            if answer.refusal:
                self._refuse(f"rank {number}: {answer.refusal}")
        answers: list[Message] = []
        for message in super().take_answers():
            if isinstance(message, WeightsStaged):
                self._staged = message
            else:
                answers.append(message)
        if self._staged is not None and not self._unstaged:
            answers.append(self._staged)
            self._staged = None
        return answers

    def exchange(self, version: int, live: WeightStore) -> WeightStore:
        """Return rank 0's part of ``version``, and make the other ranks swap theirs."""
        staged = super().exchange(version, live)
        self._team.tell(rank.SwapWeights(version))
        return staged

    def _refuse(self, why: str) -> None:
        """Fail the current update, because another rank has refused it."""
        if self._update is not None and not self._update.is_over:
            self._fail(self._update, why)
        self._staged = None


RANKS_MAX = 64
"""Limit of ranks: no machine has more processors worth using."""

ONE_READER_CHANNELS = ("relay", "collective")
"""Weight channels with one reader per engine; here every rank reads for itself."""


def ranks_channels(count: int) -> list[str]:
    """Return the weight channels of an engine with ``count`` ranks."""
    return [name for name in CHANNELS if count == 1 or name not in ONE_READER_CHANNELS]


class Ranks:
    """All ranks of one engine, as rank 0 manages them."""

    def __init__(self, count: int, *, is_deterministic: bool = False) -> None:
        """Prepare the shard and the group that the model is opened with.

        Raises:
            ConfigError: ``count`` is not possible.
        """
        if not 1 <= count <= RANKS_MAX:
            raise ConfigError(f"tensor_parallel_size must be 1 to {RANKS_MAX}, got {count}")
        if is_deterministic and count > 2:
            raise ConfigError(
                f"deterministic: sums over {count} ranks depend on the batch, those over 2 don't; "
                f"set tensor_parallel_size to 2 or 1, or leave deterministic out"
            )
        self.shard = TensorShard(0, count)
        self.group: RankGroup | None = None
        self._team: RankProcesses | None = None
        self._directory: PrivateDirectory | None = None
        if count > 1:
            from tidegate.engine.models import rank_group

            self._directory = PrivateDirectory("ranks")
            self.group = rank_group.RankGroup(0, count, self._directory.path / "meeting")

    def start(self, arguments: Sequence[str]) -> None:
        """Start the other ranks' processes, which load their part of the model."""
        if self.shard.is_whole or self._directory is None:
            return
        from tidegate.engine.ranks.team import start_team

        meeting_place = self._directory.path / "meeting"
        self._team = start_team(self.shard.ranks, [*arguments, f"--meeting-place={meeting_place}"])

    def lead(self, runner: Runner, keys: EngineKeys | None) -> Runner:
        """Wait until all ranks have loaded; return a runner over all of them.

        ``keys`` are passed on, because every rank fetches weights itself.

        Raises:
            RankLost: a rank ended before it had loaded.
        """
        if self._team is None or self.group is None:
            return runner
        assert isinstance(runner, ModelRunner)  # transformers' models are refused
        told = None if keys is None else (keys.public, keys.secret, keys.orchestrator)
        self._team.wait_loaded(InitProcessGroup(told))
        self.group.connect()
        return MultiRankRunner(runner, self._team)

    def staging(self, allocate: Callable[[], WeightStore], home: WeightReceiverConfig) -> Staging:
        """Return the staging over all ranks."""
        if self._team is None:
            return Staging(allocate, home)
        return MultiRankStaging(allocate, self._team, home)

    def sleeper(
        self,
        runner: Runner,
        staging: Staging,
        turns: SchedulerControl,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        memory: SleepableMemory | None = None,
    ) -> SleepController:
        """Return the sleeper over all ranks; ``memory`` applies to an engine of one rank."""
        if self._team is None:
            return SleepController(runner, staging, turns, reload=reload, memory=memory)
        from tidegate.engine.ranks.multi_rank_sleep import MultiRankSleepController

        return MultiRankSleepController(runner, staging, turns, reload=reload, team=self._team)

    def close(self) -> None:
        """Stop the other ranks. Harmless if repeated."""
        if self._team is not None:
            self._team.close()
            self._team = None
        if self._directory is not None:
            self._directory.remove()
