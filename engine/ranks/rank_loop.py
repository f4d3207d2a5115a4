"""Main loop of a tensor-parallel rank other than 0: its part of each step and of new weights.

Run by ``ranks/worker.py``. It decides nothing: rank 0 sends it messages in the same order as to
every rank. It reads weights from the channel that the orchestrator names, and copies its part.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.ranks.multi_rank_sleep import memory_answer
from tidegate.engine.sampling.scoring import Reads, RowScoring
from tidegate.engine.weights.staging import Live, Staging
from tidegate.transport import rank_messages as rank
from tidegate.transport.messages import InitWeights, UpdateWeights, WeightsFailed, WeightsStaged

STAGING_POLL_S = 0.002
"""Seconds between checks for staged weights while no step runs."""

SAMPLED_ELSEWHERE = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
"""Placeholder for rows that rank 0 samples; only its presence matters here."""


class RankLoop:
    """Serves rank 0, on one thread."""

    def __init__(
        self,
        connection: Connection,
        runner: ModelRunner,
        staging: Staging,
        sleeper: SleepController,
    ) -> None:
        self._connection = connection
        self._runner = runner
        self._staging = staging
        self._sleeper = sleeper
        self._version = -1
        """Version of the update under way; -1 without one."""
        self._attempt = 0
        """Rank 0's number of the update under way."""

    def run(self) -> None:
        """Serve rank 0 until it is gone.

        Raises:
            RankLost: another rank is gone or stuck.
        """
        while True:
            try:
                while not self._connection.poll(STAGING_POLL_S if self._staging.is_busy else None):
                    self._tell()
                frame = self._connection.recv_bytes()
                self._tell()
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
                self._staging.give_up(why)
            case rank.SwapWeights(version=version):
                self._runner.swap(self._staging.exchange(version, self._runner.weights))
                self._sleeper.swapped()
            case rank.RankSleep(request=asked):
                self._sleeper.ask(asked)
                while not (answers := self._sleeper.settle()):
                    time.sleep(STAGING_POLL_S)  # until the current copy has stopped
                    self._tell()
                self._send(memory_answer(answers[0]))
            case rank.RankWake(request=asked):
                self._send(memory_answer(self._sleeper.wake(asked)))
            case rank.InitProcessGroup():
                raise AssertionError("ranks meet once")

    def _relay(self, relayed: rank.ForwardWeightMessage) -> None:
        message = relayed.message
        if isinstance(message, InitWeights):
            self._staging.init(message)
        elif isinstance(message, UpdateWeights):
            self._staging.update(message)
        else:
            self._version, self._attempt = message.version, relayed.attempt
            version = relayed.live_version
            live = None if version is None else Live(version, self._runner.weights)
            self._staging.start(message, live)

    def _tell(self) -> None:
        """Report how the current update ended, if it did; results of older updates are dropped."""
        for answer in self._staging.take_answers():
            if getattr(answer, "version", None) != self._version:
                continue
            if isinstance(answer, WeightsStaged):
                self._send(rank.RankStaged(self._attempt))
            elif isinstance(answer, WeightsFailed):
                self._send(rank.RankStaged(self._attempt, answer.message))

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
        SAMPLED_ELSEWHERE if row.samples else None,
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
