"""How does an engine of several ranks run a step? Rank 0 tells the others its rows, and samples.

It knows nothing of turns. The ranks say nothing back: their parts meet in the sums of each layer,
and the logits in one more.
"""

from collections.abc import Sequence

import torch

from tidegate.engine.memory.memory import is_out_of_memory
from tidegate.engine.ranks.rank_loop import rank_rows
from tidegate.engine.ranks.team import Team
from tidegate.engine.runner import ModelRunner, Row, Runner, StepOutput
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import RankLost
from tidegate.transport.rank_messages import RunStep


class RankedRunner(Runner):
    """Rank 0's part of the model, and the others'."""

    def __init__(self, runner: ModelRunner, team: Team) -> None:
        self._runner = runner
        self._team = team

    @property
    def num_blocks(self) -> int:
        """How many blocks each rank's KV cache has."""
        return self._runner.num_blocks

    @property
    def block_tokens(self) -> int:
        """How many positions a block has."""
        return self._runner.block_tokens

    @property
    def weights(self) -> WeightStore:
        """Those that rank 0 computes the next step with."""
        return self._runner.weights

    def swap(self, weights: WeightStore) -> None:
        """Compute with others from the next step on. The other ranks are told by the staging."""
        self._runner.swap(weights)

    def cache_tensors(self) -> list[torch.Tensor]:
        """All that rank 0's KV is kept in."""
        return self._runner.cache_tensors()

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run every row's tokens, and sample after the last of those that ask for it; score others.

        Raises:
            RankLost: a rank is gone or stuck, or one had no memory in the midst of a step, after
                which the ranks can't be brought together again.
        """
        if not rows:
            return self._runner.step(rows)
        self._team.tell(RunStep(rank_rows(rows)))
        try:
            return self._runner.step(rows)
        except RankLost as error:
            raise self._team.blame(str(error)) from error
        except Exception as error:
            if is_out_of_memory(error):
                why = f"no memory for a step of {len(rows)} turns ({error})"
                raise RankLost(rank=0, ranks=self._team.ranks, why=why) from error
            raise
