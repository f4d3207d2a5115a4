"""What tokens come out of one engine step, on a device? The other implementation of ``Runner``.

Weights, KV and all that is computed stay there. The host plans a step, sends its numbers in one
transfer, launches, and waits once: for tokens and log-probs, and what else was asked for.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tidegate.engine.device.devices import on, wait_for
from tidegate.engine.device.forward import LayerPlace, device_forward, rule_of
from tidegate.engine.device.plan import HostPlanner
from tidegate.engine.device.sampling import HostDraw, PendingDraw
from tidegate.engine.device.scoring import PendingScore, launch_scores
from tidegate.engine.device.upload import Upload
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.models.model import head_logits
from tidegate.engine.models.model_config import AttentionKind, ModelConfig
from tidegate.engine.models.rope_tables import make_rope_table
from tidegate.engine.runner import Row
from tidegate.engine.sampling.sampling import StepOutput
from tidegate.engine.weights.weight_store import WeightStore


class DeviceRunner:
    """Runs one model on one device; on a CPU in Triton's interpreter only."""

    def __init__(
        self, config: ModelConfig, weights: DeviceWeights, *, num_blocks: int, block_tokens: int
    ) -> None:
        self.config = config
        self.weights = weights
        """May be replaced between two steps, by weights of the same config and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._device = weights.device
        with on(self._device):
            self._places = self._make_places()
            self._upload = Upload(self._device)
        self._planner = HostPlanner(block_tokens)

    def swap(self, weights: WeightStore) -> None:
        """Compute with others from the next step on: those of the same model."""
        if not isinstance(weights, DeviceWeights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """All that the KV is kept in, and nothing that must outlast it."""
        return [place.cache for place in self._places]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run every row's tokens, and sample after the last of those that ask for it; score others.

        A row may attend to blocks that rows before it fill in this very step, for each layer
        writes all keys and values before any row attends.
        """
        if not rows:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        with on(self._device):
            try:
                pending, scores = self._launch(rows)
            finally:
                # If a launch failed, too: the next step writes where this one's numbers come from.
                wait_for(self._device)
        output = StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        if pending is not None:
            output = pending.read()
        return replace(output, scores=[read() for read in scores]) if scores else output

    def _launch(self, rows: Sequence[Row]) -> tuple[PendingDraw | None, list[PendingScore]]:
        """Everything that the device does in this step."""
        host = self._planner.plan(rows)
        draw = HostDraw([row.sampling for row in rows if row.sampling is not None])
        sent = self._upload.send([*host.arrays, *draw.arrays])
        plan = host.on_device(sent[: len(host.arrays)])
        hidden = device_forward(self.weights, self._places, plan)
        sampled = len(draw.sampling)
        pending = None
        if sampled:
            logits = head_logits(self.weights, hidden[:sampled])
            pending = draw.launch(logits, sent[len(host.arrays) :])
        scoring = [row.scoring for row in rows if row.scoring is not None]
        return pending, launch_scores(self.weights, hidden[sampled:], scoring)

    def _make_places(self) -> list[LayerPlace]:
        config, dtype = self.config, self.weights.dtype
        size = (self.num_blocks, 2, config.num_kv_heads, self.block_tokens, config.head_dim)
        positions = min(config.context_tokens_max, self.num_blocks * self.block_tokens)

        def table(kind: AttentionKind) -> torch.Tensor:
            made = make_rope_table(
                kind.rope, head_dim=config.head_dim, positions=positions, dtype=dtype
            )
            return made.to(self._device)

        tables = {kind: table(kind) for kind in {layer.attention for layer in config.layers}}
        return [
            # Zeros, not whatever memory holds: a masked position is still multiplied, by 0.
            LayerPlace(
                torch.zeros(size, dtype=dtype, device=self._device),
                tables[layer.attention],
                rule_of(config, layer.attention.window_tokens),
            )
            for layer in config.layers
        ]
