"""Rank 0's side of tensor parallelism: starts the other ranks, and runs steps and updates on all.

Rank 0 sends each step's rows to the other ranks, and samples; the ranks' parts are combined by
all-reduce in each layer. Each rank copies its part of new weights from the channel. If one rank
refuses a version, all do. All ranks swap between the same two steps, because every rank receives
swaps and steps in the same order. An engine of one rank uses plain ``Staging``, ``SleepController``
and ``Runner``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidegate.engine.execution.runner import ModelRunner, Row, Runner, StepOutput, WrappedRunner
from tidegate.engine.execution.sleep import SchedulerControl, SleepableMemory, SleepController
from tidegate.engine.memory.out_of_memory import is_out_of_memory
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.ranks.rank_loop import rank_rows
from tidegate.engine.ranks.rank_processes import RankProcesses
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
from tidegate.transport.weight_channels import LOCAL_CONFIG, WeightReceiverConfig

if TYPE_CHECKING:
    from tidegate.engine.models.rank_group import RankGroup


class MultiRankRunner(WrappedRunner):
    """Runs steps on rank 0 and all other ranks; the staging swaps the other ranks' weights."""

    def __init__(self, runner: ModelRunner, peers: RankProcesses) -> None:
        super().__init__(runner)
        self._peers = peers

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run each row's tokens; sample after rows with ``sampling``, score rows with ``scoring``.

        Raises:
            RankLost: a rank is gone or stuck, or failed within a step, after which the ranks cannot
                be synchronised again.
        """
        if not rows:
            return self._runner.step(rows)
        self._peers.broadcast(RunStep(rank_rows(rows)))
        try:
            return self._runner.step(rows)
        except RankLost as error:
            raise self._peers.lost_rank_error(str(error)) from error
        except Exception as error:
            why = f"a step of {len(rows)} turns failed: {type(error).__name__}: {error}"
            if is_out_of_memory(error):
                why = f"no memory for a step of {len(rows)} turns ({error})"
            raise RankLost(rank=0, ranks=self._peers.ranks, why=why) from error


class MultiRankStaging(Staging):
    """Stages weights on rank 0 and all other ranks."""

    def __init__(
        self,
        allocate: Callable[[], WeightStore],
        peers: RankProcesses,
        receiver_config: WeightReceiverConfig = LOCAL_CONFIG,
    ) -> None:
        super().__init__(allocate, receiver_config)
        self._peers = peers
        self._attempt = 0
        """Number of updates started; reports of older updates are ignored."""
        self._pending_ranks: set[int] = set()
        """Ranks that have not reported the current update as complete."""
        self._rank_0_staged: WeightsStaged | None = None
        """Rank 0's own reply, held until all other ranks have reported."""

    @property
    def is_busy(self) -> bool:
        """Whether a reply may become due."""
        return super().is_busy or self._rank_0_staged is not None

    def init(self, message: InitWeights) -> None:
        """Phase 1 on every rank: open the channel."""
        self._peers.broadcast(rank.ForwardWeightMessage(message))
        super().init(message)

    def start(self, message: StartWeightUpdate, live: Live | None = None) -> None:
        """Phase 2 on every rank: begin a version."""
        self._attempt += 1
        self._pending_ranks = set(range(1, self._peers.ranks))
        self._rank_0_staged = None
        version = None if live is None else live.version
        self._peers.broadcast(rank.ForwardWeightMessage(message, self._attempt, version))
        super().start(message, live)

    def update(self, message: UpdateWeights) -> None:
        """Phase 3 on every rank: copy tensors."""
        self._peers.broadcast(rank.ForwardWeightMessage(message))
        super().update(message)

    def abandon(self) -> None:
        """Drop the current update, complete or not, on every rank."""
        self._peers.broadcast(rank.AbortWeightUpdate())
        self._pending_ranks.clear()
        self._rank_0_staged = None
        super().abandon()

    def cancel_update(self, why: str) -> bool:
        """Stop the current update on every rank; return whether this rank's buffer is unused."""
        self._peers.broadcast(rank.AbortWeightUpdate(why))
        self._pending_ranks.clear()
        self._rank_0_staged = None
        return super().cancel_update(why)

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete on every rank."""
        return (
            super().is_staged(version) and not self._pending_ranks and self._rank_0_staged is None
        )

    def take_replies(self) -> list[Message]:
        """Return updates staged on every rank, or failed on at least one, since the last call.

        Raises:
            RankLost: a rank is gone.
        """
        for number, reply in self._peers.take_staged():
            if reply.attempt != self._attempt:
                continue
            self._pending_ranks.discard(number)
            if reply.refusal:
                self._refuse(f"rank {number}: {reply.refusal}")
        replies: list[Message] = []
        for message in super().take_replies():
            if isinstance(message, WeightsStaged):
                self._rank_0_staged = message
            else:
                replies.append(message)
        if self._rank_0_staged is not None and not self._pending_ranks:
            replies.append(self._rank_0_staged)
            self._rank_0_staged = None
        return replies

    def swap(self, version: int, live: WeightStore) -> WeightStore:
        """Return rank 0's part of ``version``, and make the other ranks swap theirs."""
        staged = super().swap(version, live)
        self._peers.broadcast(rank.SwapWeights(version))
        return staged

    def _refuse(self, why: str) -> None:
        """Fail the current update, because another rank has refused it."""
        if self._update is not None and not self._update.has_failed:
            self._fail(self._update, why)
        self._rank_0_staged = None


RANKS_MAX = 64
"""Limit of ranks; larger values are taken for mistakes."""


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
        self._peers: RankProcesses | None = None
        self._directory: PrivateDirectory | None = None
        if count > 1:
            from tidegate.engine.models import rank_group

            self._directory = PrivateDirectory("ranks")
            self._rendezvous_file = self._directory.path / "rendezvous"
            self.group = rank_group.RankGroup(0, count, self._rendezvous_file)

    def start(self, arguments: Sequence[str]) -> None:
        """Start the other ranks' processes, which load their part of the model."""
        if self.shard.is_whole or self._directory is None:
            return
        from tidegate.engine.ranks.rank_processes import start_ranks

        self._peers = start_ranks(
            self.shard.ranks, [*arguments, f"--rendezvous-file={self._rendezvous_file}"]
        )

    def lead(self, runner: Runner, keys: EngineKeys | None) -> Runner:
        """Wait until all ranks have loaded; return a runner over all of them.

        ``keys`` are sent to all ranks, because every rank fetches weights itself.

        Raises:
            RankLost: a rank ended before it had loaded.
        """
        if self._peers is None or self.group is None:
            return runner
        assert isinstance(runner, ModelRunner)  # transformers' models are refused
        connect = None if keys is None else (keys.public, keys.secret, keys.orchestrator)
        self._peers.wait_loaded(InitProcessGroup(connect))
        self.group.connect()
        return MultiRankRunner(runner, self._peers)

    def staging(
        self, allocate: Callable[[], WeightStore], receiver_config: WeightReceiverConfig
    ) -> Staging:
        """Return the staging over all ranks."""
        if self._peers is None:
            return Staging(allocate, receiver_config)
        return MultiRankStaging(allocate, self._peers, receiver_config)

    def sleep_controller(
        self,
        runner: Runner,
        staging: Staging,
        turns: SchedulerControl,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        memory: SleepableMemory | None = None,
    ) -> SleepController:
        """Return the sleep controller of all ranks; ``memory`` applies to an engine of one rank."""
        if self._peers is None:
            return SleepController(runner, staging, turns, reload=reload, memory=memory)
        from tidegate.engine.ranks.multi_rank_sleep import MultiRankSleepController

        return MultiRankSleepController(runner, staging, turns, reload=reload, peers=self._peers)

    def close(self) -> None:
        """Stop the other ranks. Harmless if repeated."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        if self._directory is not None:
            self._directory.remove()
