"""Step runner of a GPU: implements ``Runner``, as ``ModelRunner`` does for the CPU.

Weights, KV cache and hidden states stay on the device. The host plans a step, uploads its index
arrays in one transfer, launches the forward pass, and synchronises once, for tokens, log-probs and
scores; the forward passes of decode steps are CUDA graphs. Torch computes matrix products;
attention, rotary embedding, cache writes and norms are Triton kernels. A layer's residual sum and
its last term are kept apart, because the next norm's kernel adds them.

Letters in shapes: T tokens of a step, S output tokens, P positions scored, H hidden size, A query
heads, K KV heads, D head width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tidegate.engine.device.devices import CPU, on, synchronize
from tidegate.engine.device.graphs import Capture, CudaCapture, DecodeGraphs
from tidegate.engine.device.plan import DevicePlan, HostPlan, HostPlanner, Upload
from tidegate.engine.device.sampling import HostDraw, PendingDraw, copy_to_host
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.execution.runner import DecodeRows, Row
from tidegate.engine.models.layer_weights import LayerWeights
from tidegate.engine.models.model import ACTIVATIONS, head_logits
from tidegate.engine.models.model_config import AttentionKind, ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.models.rope_tables import make_rope_table
from tidegate.engine.sampling.sampling import (
    StepOutput,
    hidden_rows,
    with_hidden_states,
)
from tidegate.engine.sampling.scoring import RowScore, RowScoring, score_rows
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.kernels.head_logprobs import head_logprobs_triton
from tidegate.kernels.paged_attention import AttentionRule, paged_attention_triton
from tidegate.kernels.residual_norm import residual_norm_triton
from tidegate.kernels.rope_write import rope_write_triton

PendingScore = Callable[[], RowScore]
"""Reads a score after the device has been synchronised."""


def launch_scores(
    weights: Weights, hidden: torch.Tensor, rows: Sequence[RowScoring]
) -> list[PendingScore]:
    """Launch the scoring of rows whose normed hidden states ``hidden`` [P, H] are concatenated."""
    parts = hidden.split_with_sizes([row.positions for row in rows])
    return [_launch(weights, part, row) for part, row in zip(parts, rows, strict=True)]


def _launch(weights: Weights, hidden: torch.Tensor, row: RowScoring) -> PendingScore:
    if row.reads != "logprobs" or row.top_logprobs:
        (score,) = score_rows(weights, hidden, [row])
        return lambda: score
    logprobs = head_logprobs_triton(
        hidden.float(),
        weights.head.unpacked(),
        torch.from_numpy(row.token_ids).long().to(hidden.device),
        temperature=row.temperature,
        soft_cap=weights.config.logits_soft_cap,
    )
    on_host = copy_to_host(logprobs)
    return lambda: RowScore(logprobs=on_host.numpy())


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's KV cache and attention parameters, constant between steps."""

    cache: torch.Tensor
    """[blocks, 2, K, block_tokens, D]"""
    table: torch.Tensor
    """[positions, 2, D], rotary table."""
    rule: AttentionRule


def device_forward(
    weights: Weights, attentions: Sequence[LayerAttention], plan: DevicePlan
) -> torch.Tensor:
    """Launch a forward pass; return the normed hidden states [S, H] of the plan's output tokens."""
    config = weights.config
    total = weights.embedding.take(plan.token_ids)
    if config.embedding_scale != 1.0:  # rounded first, as transformers does
        total *= float(torch.tensor(config.embedding_scale, dtype=total.dtype))
    update: torch.Tensor | None = None
    for layer, attention in zip(weights.layers, attentions, strict=True):
        normed = _norm(total, update, layer.input_norm, config)
        attended = _attention(layer, config, normed, attention, plan)
        update = layer.output.linear(attended, layer.output_bias)
        if layer.attention_post_norm is not None:
            update = _norm(update, None, layer.attention_post_norm, config)
        normed = _norm(total, update, layer.mlp_norm, config)
        update = _mlp(layer, config, normed)
        if layer.mlp_post_norm is not None:
            update = _norm(update, None, layer.mlp_post_norm, config)
    total = total.index_select(0, plan.output_tokens)
    if update is not None:
        update = update.index_select(0, plan.output_tokens)
    return _norm(total, update, weights.final_norm, config)


def rule_of(config: ModelConfig, window_tokens: int | None) -> AttentionRule:
    """Return the attention parameters of a layer with this sliding window."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return AttentionRule(scale, window_tokens, config.attention_soft_cap)


def _attention(
    layer: LayerWeights,
    config: ModelConfig,
    normed: torch.Tensor,
    attention: LayerAttention,
    plan: DevicePlan,
) -> torch.Tensor:
    """Write a layer's keys and values to the cache, and attend; return [T, A * D]."""
    qkv = layer.qkv.linear(normed, layer.qkv_bias)
    qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    if layer.qk_norm is not None:
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        rotated.copy_(_norm(rotated, None, layer.qk_norm, config))
    query = rope_write_triton(
        qkv, attention.cache, table=attention.table, positions=plan.positions, slots=plan.slots
    )
    outputs = [
        paged_attention_triton(
            query[group.first_token : group.end_token], attention.cache, group.rows, attention.rule
        )
        for group in plan.groups
    ]
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return attended.view(-1, config.num_heads * config.head_dim)


def _mlp(layer: LayerWeights, config: ModelConfig, normed: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up[0].linear(normed, layer.gate_up_bias).chunk(2, dim=-1)
    inner = ACTIVATIONS[config.activation](gate).mul_(up)
    return layer.down[0].linear(inner, layer.down_bias)


def _norm(
    total: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    """Add ``update`` to ``total`` in place, and return the normed sum."""
    epsilon = config.norm_epsilon
    return residual_norm_triton(total, update, weight, epsilon, gemma=config.norm_adds_one)


class DeviceRunner:
    """Runs one model on one GPU; on a CPU only with Triton's interpreter."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        *,
        num_blocks: int,
        block_tokens: int,
        has_graphs: bool = True,
        capture: Capture | None = None,
    ) -> None:
        """``capture`` replaces CUDA's, which a CPU has not: there ``has_graphs`` has no effect."""
        self.config = config
        self.weights = weights
        """Replaced between two steps only, by weights of the same config and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._device = weights.device
        with on(self._device):
            self._layer_attention = self._make_layer_attention()
            self._upload = Upload(self._device)
            if capture is None and has_graphs and self._device.type != CPU:
                capture = CudaCapture()
            self._graphs = None if capture is None else self._make_graphs(capture)
        self._planner = HostPlanner(block_tokens)

    def swap(self, weights: WeightStore) -> None:
        """Use other weights of the same model from the next step on."""
        if not isinstance(weights, DeviceWeights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the KV cache, one tensor per layer."""
        return [attention.cache for attention in self._layer_attention]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run each row's tokens in one batch, wait for the device, and return the results.

        Samples one token after each row with ``sampling``, and scores the rows with ``scoring``. A
        row may attend to blocks that earlier rows of the same step fill, because each layer writes
        all keys and values before any row attends.
        """
        if not rows:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        if isinstance(rows, DecodeRows):
            draw, scoring = HostDraw.of_decodes(rows), []
        else:
            draw = HostDraw([row.sampling for row in rows if row.sampling is not None])
            scoring = [row.scoring for row in rows if row.scoring is not None]
        with on(self._device):
            try:
                host = self._planner.plan(rows)
                pending, hidden, scores = self._launch(host, draw, scoring)
            finally:
                # Also after a failed launch, because the next step overwrites the upload buffer.
                synchronize(self._device)
        output = StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        if pending is not None:
            output = pending.read()
        if hidden is not None:
            output = with_hidden_states(output, hidden_rows(draw.sampling), hidden)
        return replace(output, scores=[read() for read in scores]) if scores else output

    def _launch(
        self, host: HostPlan, draw: HostDraw, scoring: Sequence[RowScoring]
    ) -> tuple[PendingDraw | None, torch.Tensor | None, list[PendingScore]]:
        """Upload the plan, and launch the step's kernels and copies without waiting.

        Return the samples, the requested hidden states, None without any, and the scores.
        """
        hidden = None if self._graphs is None else self._graphs.forward(self.weights, host)
        if hidden is None:
            hidden, columns = self._forward_eagerly(host, draw)
        else:
            columns = self._upload.send(draw.arrays)
        sampled = len(draw.arrays[0])
        pending = reported = None
        if chosen := hidden_rows(draw.sampling):
            reported = copy_to_host(hidden[chosen])
        if sampled:
            pending = draw.launch(head_logits(self.weights, hidden[:sampled]), columns)
        return pending, reported, launch_scores(self.weights, hidden[sampled:], scoring)

    def _forward_eagerly(
        self, host: HostPlan, draw: HostDraw
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Upload everything in one transfer; return hidden states and the uploaded ``draw``."""
        uploaded = self._upload.send([*host.arrays, *draw.arrays])
        plan = host.on_device(uploaded[: len(host.arrays)])
        hidden = device_forward(self.weights, self._layer_attention, plan)
        return hidden, uploaded[len(host.arrays) :]

    def _make_graphs(self, capture: Capture) -> DecodeGraphs:
        attentions = self._layer_attention
        return DecodeGraphs(
            capture,
            lambda weights, plan: device_forward(weights, attentions, plan),
            self._device,
            [tensor for each in attentions for tensor in (each.cache, each.table)],
        )

    def _make_layer_attention(self) -> list[LayerAttention]:
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
            # Zeros, because masked positions are multiplied by 0, and NaN * 0 is NaN.
            LayerAttention(
                torch.zeros(size, dtype=dtype, device=self._device),
                tables[layer.attention],
                rule_of(config, layer.attention.window_tokens),
            )
            for layer in config.layers
        ]
