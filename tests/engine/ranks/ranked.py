"""An engine of several ranks in one process: each rank but 0 is a thread, sums go over loopback."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.served_model import ServedModel, open_model
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.models.model_weights import Quantization
from tidegate.engine.models.rank_group import RankGroup
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.ranks.multi_rank_sleep import NullSchedulerControl
from tidegate.engine.ranks.rank_loop import RankLoop
from tidegate.engine.ranks.rank_processes import RankProcesses
from tidegate.engine.ranks.ranks import MultiRankRunner, MultiRankStaging
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ModelError, RankLost
from tidegate.transport import rank_messages as rank

Reload = Callable[[WeightStore, Callable[[], None]], None]


class RankThread:
    """Thread with the ``Process`` interface that :class:`RankProcesses` expects."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()

    def kill(self) -> None:
        raise AssertionError("a thread can't be killed")


def _no_room() -> WeightStore:
    raise MemoryError("none left")


def _at_the_second_try(reload: Reload) -> Reload:
    tries = iter([False, True])

    def later(weights: WeightStore, heartbeat: Callable[[], None]) -> None:
        if not next(tries):
            raise ModelError("the model directory is not there")
        reload(weights, heartbeat)

    return later


class RankedEngine:
    """Rank 0's side of the engine."""

    def __init__(
        self,
        path: Path,
        ranks: int,
        *,
        deterministic: bool,
        quantization: Quantization | None,
        lacks_room: bool,
        reloads_late: bool,
    ) -> None:
        self._path, self._ranks, self._lacks_room = path, ranks, lacks_room
        self._reloads_late = reloads_late
        self.runners: dict[int, ModelRunner] = {}
        """Runners by rank."""
        self._is_deterministic, self._quantization = deterministic, quantization
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        connections, threads = [], []
        for number in range(1, ranks):
            mine, expected = Pipe()
            thread = threading.Thread(target=self._serve, args=(number, expected), daemon=True)
            thread.start()
            connections.append(mine)
            threads.append(RankThread(thread))
        self.peers = RankProcesses(connections, threads)
        model, runner, group = self._open(0)
        self.peers.wait_loaded()
        group.connect()
        self.runner = MultiRankRunner(runner, self.peers)
        self.model = model
        self.staging = MultiRankStaging(model.allocate, self.peers)

    def _open(self, number: int) -> tuple[ServedModel, ModelRunner, RankGroup]:
        shard = TensorShard(number, self._ranks)
        group = RankGroup(number, self._ranks, Path(self.directory.name) / "meeting")
        model = open_model(
            self._path,
            "float32",
            shard=shard,
            group=group,
            is_deterministic=self._is_deterministic,
            quantization=self._quantization,
        )
        runner = model.make_runner(num_blocks=128, block_tokens=8)
        assert isinstance(runner, ModelRunner)
        self.runners[number] = runner
        return model, runner, group

    def _serve(self, number: int, connection: Connection) -> None:
        model, runner, group = self._open(number)
        connection.send_bytes(rank.encode(rank.RankLoaded()))
        rank.decode_to_rank(connection.recv_bytes())
        group.connect()
        staging = Staging(_no_room if self._lacks_room else model.allocate)
        reload = _at_the_second_try(model.reload) if self._reloads_late else model.reload
        sleep_controller = SleepController(runner, staging, NullSchedulerControl(), reload=reload)
        try:
            RankLoop(connection, runner, staging, sleep_controller).run()
        except RankLost as error:
            connection.send_bytes(rank.encode(rank.RankFailed(str(error))))
        finally:
            sleep_controller.close()
            staging.close()
            connection.close()


@contextmanager
def ranked_engine(
    path: Path,
    ranks: int = 2,
    *,
    deterministic: bool = False,
    quantization: Quantization | None = None,
    lacks_room: bool = False,
    reloads_late: bool = False,
) -> Iterator[RankedEngine]:
    """Start an engine of ``ranks`` ranks, closed at the end of the block.

    All but rank 0 may lack room for an update, or fail once to reload the model directory.
    """
    engine = RankedEngine(
        path,
        ranks,
        deterministic=deterministic,
        quantization=quantization,
        lacks_room=lacks_room,
        reloads_late=reloads_late,
    )
    try:
        yield engine
    finally:
        engine.peers.close()
        engine.staging.close()
        engine.directory.cleanup()
