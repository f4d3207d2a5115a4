"""Main loop of a tensor-parallel rank other than 0: computes its part of each step, and stages its
part of new weights.

The loop decides nothing: rank 0 sends the same messages in the same order to every rank. Each rank
reads weights from the channel that the orchestrator names, and copies its own part.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.ranks.multi_rank_sleep import memory_reply
from tidegate.engine.sampling.scoring import Reads, RowScoring
from tidegate.engine.weights.staging import Live, Staging
from tidegate.transport import rank_messages as rank
from tidegate.transport.messages import InitWeights, UpdateWeights, WeightsFailed, WeightsStaged

STAGING_POLL_S = 0.002
"""Seconds between checks for staged weights while no step runs."""

SAMPLED_ON_RANK_0 = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
"""Placeholder for rows that rank 0 samples; other ranks only check that ``sampling`` is set."""


class RankLoop:
    """Executes rank 0's messages, on one thread."""

    def __init__(
        self,
        connection: Connection,
        runner: ModelRunner,
        staging: Staging,
        sleep_controller: SleepController,
    ) -> None:
        self._connection = connection
        self._runner = runner
        self._staging = staging
        self._sleep_controller = sleep_controller
        self._version = -1
        """Version of the update under way; -1 without one."""
        self._attempt = 0
        """Rank 0's attempt number of the update under way."""

    def run(self) -> None:
        """Serve rank 0 until it is gone.

        Raises:
            RankLost: another rank is gone or stuck.
        """
        while True:
            try:
                while not self._connection.poll(STAGING_POLL_S if self._staging.is_busy else None):
                    self._report_staged()
                frame = self._connection.recv_bytes()
                self._report_staged()
            except (EOFError, ConnectionError):
                return  # rank 0 has ended
            self._handle(rank.decode_to_rank(frame))

    def _handle(self, message: rank.ToRank) -> None:
        match message:
            case rank.RunStep(rows=rows):
                self._runner.assist([row_of(row) for row in rows])
            case rank.ForwardWeightMessage():
                self._relay(message)
            case rank.AbortWeightUpdate(reason=""):
                self._staging.abandon()
                self._version = -1
            case rank.AbortWeightUpdate(reason=why):
                self._staging.cancel_update(why)
            case rank.SwapWeights(version=version):
                self._runner.swap(self._staging.swap(version, self._runner.weights))
                self._sleep_controller.swapped()
            case rank.RankSleep(request=request):
                self._sleep_controller.queue_request(request)
                while not (replies := self._sleep_controller.run_pending()):
                    time.sleep(STAGING_POLL_S)  # until the current copy has stopped
                    self._report_staged()
                self._send(memory_reply(replies[0]))
            case rank.RankWake(request=request):
                self._send(memory_reply(self._sleep_controller.wake(request)))
            case rank.InitProcessGroup():
                raise AssertionError("InitProcessGroup was sent twice")

    def _relay(self, relay: rank.ForwardWeightMessage) -> None:
        message = relay.message
        if isinstance(message, InitWeights):
            self._staging.init(message)
        elif isinstance(message, UpdateWeights):
            self._staging.update(message)
        else:
            self._version, self._attempt = message.version, relay.attempt
            version = relay.live_version
            live = None if version is None else Live(version, self._runner.weights)
            self._staging.start(message, live)

    def _report_staged(self) -> None:
        """Report the outcome of the current update, if it has ended; outcomes of older updates are
        dropped."""
        for reply in self._staging.take_replies():
            if getattr(reply, "version", None) != self._version:
                continue
            if isinstance(reply, WeightsStaged):
                self._send(rank.RankStaged(self._attempt))
            elif isinstance(reply, WeightsFailed):
                self._send(rank.RankStaged(self._attempt, reply.message))

    def _send(self, message: rank.FromRank) -> None:
        self._connection.send_bytes(rank.encode(message))


def rank_rows(rows: Sequence[Row]) -> list[rank.RankRow]:
    """Encode a step's rows for the other ranks."""
    return [
        rank.RankRow(
            row.token_ids.astype(np.int32).tobytes(),
            row.start,
            np.array(row.block_table, np.int32).tobytes(),
            row.sampling is not None,
            row.adapter,
            None if row.scoring is None else _scoring(row.scoring),
        )
        for row in rows
    ]


def row_of(row: rank.RankRow) -> Row:
    """Decode a row that rank 0 sent."""
    scoring = row.scoring
    return Row(
        np.frombuffer(row.token_ids, np.int32),
        row.start,
        np.frombuffer(row.block_table, np.int32).tolist(),
        SAMPLED_ON_RANK_0 if row.samples else None,
        None
        if scoring is None
        else RowScoring(
            scoring.positions,
            cast(Reads, scoring.reads),
            np.frombuffer(scoring.token_ids, np.int32).copy(),  # torch needs writable memory
            scoring.top_logprobs,
            scoring.temperature,
        ),
        row.adapter,
    )


def _scoring(scoring: RowScoring) -> rank.RankScoring:
    return rank.RankScoring(
        scoring.positions,
        scoring.reads,
        scoring.token_ids.astype(np.int32).tobytes(),
        scoring.top_logprobs,
        scoring.temperature,
    )
