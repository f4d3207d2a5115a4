"""Turns that decode together step after step, with little work per turn and step.

The scheduler makes a :class:`DecodeBatch` when two successive steps decode the same turns, and
drops it when a step differs. Corresponds to vLLM's persistent batch. The sequences stay up to date
after every step; the columns of rows and step messages are kept beside them.
"""

from collections.abc import Sequence

import numpy as np

from tidegate.engine.execution.runner import DecodeRows, StepOutput
from tidegate.engine.scheduling.prefixes import Prefixes
from tidegate.engine.scheduling.sequences import EngineSequence
from tidegate.engine.scheduling.step_columns import SampledRows, StepColumns
from tidegate.transport.messages import LENGTH, RUNNING, STOP


class DecodeBatch:
    """The sequences of successive steps that only decode, with options that compiled code draws
    by."""

    def __init__(self, sequences: Sequence[EngineSequence]) -> None:
        """``sequences`` are planned, and :func:`can_decode_plainly` is true of each."""
        self.sequences = sequences
        self.rows = DecodeRows([sequence.next_row() for sequence in sequences])
        """The rows of the planned step."""
        self._tokens = [sequence.tokens.data for sequence in sequences]
        self._stop_ids: frozenset[int] = frozenset().union(*(each.stop_ids for each in sequences))
        self._counted = [
            (index, options)
            for index, options in self.rows.options.items()
            if options.counts_tokens
        ]
        """Options that are given each token, with their rows."""
        self._checked_at = [_next_check(sequence) for sequence in sequences]
        """Position of each sequence's token that fills a block to share, or after which it ends."""
        self._turns = np.array([sequence.handle for sequence in sequences], "<u4").tobytes()

    def complete(
        self, output: StepOutput, version: int, prefixes: Prefixes
    ) -> tuple[StepColumns, list[EngineSequence]]:
        """Add a step's tokens to the sequences; return the step's columns and the ended sequences.

        ``output`` has finite log-probs for each row, and no routed experts.
        """
        positions: list[int] = self.rows.columns.positions.tolist()
        sampled: list[int] = output.token_ids.tolist()
        due: list[int] = []
        rows = zip(self.sequences, self._tokens, positions, self._checked_at, sampled, strict=True)
        for index, (sequence, tokens, position, checked_at, token_id) in enumerate(rows):
            computed = position + 1
            tokens[computed] = token_id
            sequence.computed = computed
            sequence.length = computed + 1
            if position >= checked_at:
                due.append(index)
        finish = {}
        for index in due:
            sequence = self.sequences[index]
            if sequence.computed >= sequence.share_at:
                prefixes.share(sequence, sequence.computed)
            if sequence.length == sequence.length_max:
                finish[index] = LENGTH
            self._checked_at[index] = _next_check(sequence)
        for index, options in self._counted:
            if options.append(sampled[index], int(self.rows.columns.draws[index])):
                finish[index] = STOP
        if not self._stop_ids.isdisjoint(sampled):
            for index, token_id in enumerate(sampled):
                if token_id in self.sequences[index].stop_ids:
                    finish[index] = STOP
        attachments = SampledRows()
        for index, each in output.attachments.items():
            attachments.add_attachments(self.sequences[index], [each])
        self.rows.advance(output.token_ids)
        codes = bytes([finish.get(row, RUNNING) for row in range(len(sampled))]) if finish else b""
        columns = StepColumns(
            version=version,
            turns=self._turns,
            token_ids=output.token_ids.tobytes(),
            logprobs=output.logprobs.tobytes(),
            finish=codes,
            attachments=attachments.attachments,
        )
        return columns, [self.sequences[index] for index in finish]


def _next_check(sequence: EngineSequence) -> int:
    # The last token that a sequence samples is never computed.
    return min(sequence.share_at, sequence.length_max - 1) - 1


def can_decode_plainly(sequence: EngineSequence) -> bool:
    """Return whether a sequence that is planned to decode needs nothing but what a draw gives."""
    return (
        not sequence.is_prefilling
        and sequence.sampling.is_drawn_whole
        and not sequence.adapter
        and not sequence.reports_positions
    )
