"""Process of a tensor-parallel rank other than 0: ``python -m tidegate.engine.ranks.worker``.

Rank 0 starts the process and commands it over a pipe. Weights come directly from the orchestrator's
weight channel. The kernel kills the process when rank 0 ends.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.served_model import OwnModel, open_model
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.models.rank_group import RankGroup
from tidegate.engine.models.shards import TensorShard
from tidegate.engine.ranks.multi_rank_sleep import NullSchedulerControl
from tidegate.engine.ranks.rank_loop import RankLoop
from tidegate.engine.weights.staging import Staging
from tidegate.errors import TidegateError
from tidegate.transport import rank_messages as rank
from tidegate.transport.security import EngineKeys
from tidegate.transport.weight_channels import WeightReceiverConfig

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: sets the signal that the process gets when its parent dies."""


def main() -> int:
    """Serve rank 0 until it is gone; return the exit status."""
    arguments = _parse()
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # SIGKILL also ends a rank that blocks in a collective
    if os.getppid() != arguments.rank_0:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    connection = Connection(arguments.connection)
    try:
        _serve(arguments, connection)
    except Exception as error:  # noqa: BLE001  (any failure must reach rank 0)
        if not isinstance(error, TidegateError):
            traceback.print_exc()
        why = str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send_bytes(rank.encode(rank.RankFailed(why)))
        return 1
    return 0


def _serve(arguments: argparse.Namespace, connection: Connection) -> None:
    torch.set_num_threads(arguments.threads)
    shard = TensorShard(arguments.rank, arguments.ranks)
    group = RankGroup(shard.rank, shard.ranks, arguments.rendezvous_file)
    model = open_model(
        arguments.model,
        arguments.dtype,
        is_deterministic=arguments.deterministic,
        quantization=arguments.quantization,
        shard=shard,
        group=group,
    )
    assert isinstance(model, OwnModel)  # other models are refused
    runner = model.make_runner(
        num_blocks=arguments.num_kv_blocks, block_tokens=arguments.block_tokens
    )
    assert isinstance(runner, ModelRunner)  # Tidegate's own models have one
    connection.send_bytes(rank.encode(rank.RankLoaded()))
    connect = rank.decode_to_rank(connection.recv_bytes())
    if not isinstance(connect, rank.InitProcessGroup):
        raise AssertionError("the first message must be InitProcessGroup")
    group.connect()
    keys = None if connect.keys is None else EngineKeys(*connect.keys)
    staging = Staging(model.allocate, WeightReceiverConfig(arguments.orchestrator, keys))
    sleep_controller = SleepController(runner, staging, NullSchedulerControl(), reload=model.reload)
    try:
        RankLoop(connection, runner, staging, sleep_controller).run()
    finally:
        sleep_controller.close()
        staging.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tidegate.engine.ranks.worker")
    for name in (
        "rank",
        "ranks",
        "connection",
        "num-kv-blocks",
        "block-tokens",
        "threads",
        "rank-0",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("model", "rendezvous-file"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--orchestrator", required=True, help="the orchestrator's address")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
