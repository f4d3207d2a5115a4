"""Mismatch KL and diverging routers of a mixture, without and with routing replay, and its cost.

``python -m benchmarks.routing_replay [--json]`` prints ``name, value, unit, peer, ratio``. Random
Qwen3-MoE models in bfloat16, of 8 layers of 64 experts, sample by this engine's kernels; the same
tokens are then computed by ``transformers``, once with its own routers and once with the engine's
routed experts. A case is ``experts per token/standard deviation of the weights``; wider weights
make a log-prob depend more on which experts computed it. Values are medians of three models.

* ``diverging_routers``: share of tokens and layers with another set of experts;
  ``diverging_tokens``: share of tokens with another set in some layer.
* ``mismatch_kl``: mean of ``w - 1 - log w`` over sampled tokens, ``w`` the ratio of the trainer's
  probability and the engine's (k3, as prime-rl's ``mismatch_kl``); the peer is without replay.
* ``floor_kl``: mismatch KL of mixtures of the same shape whose experts are all used by each token,
  so that the routers' choices are equal by construction.
* ``decode_tokens_per_cpu_s``: in this process, 16 turns at once, no wire; the peer reports no
  experts. Both alternate.

Source of the measurement: Ma et al. 2025, arXiv:2510.11370, section 3.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.table import Row, compared, main, medians
from tidegate.engine.execution.runner import Row as EngineRow
from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.sampling.sampling import RowSampling
from tidegate.policies.diagnostics import measure_mismatch
from tidegate.policies.routing_replay import record_routed_experts, replay_routed_experts

VOCAB = 512
LAYERS, EXPERTS = 8, 64
CASES = ((8, 0.05), (8, 0.1), (2, 0.05), (2, 0.1))
"""Experts per token and standard deviation of the random weights."""

MODELS = 3
TURNS, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 96
BLOCK_TOKENS, TURN_BLOCKS = 16, 7
RATE_RUNS = 7


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rollouts of the engine; R rows of T tokens, N of them sampled."""

    token_ids: Tensor
    """[R, T]"""
    logprobs: Tensor
    """[R, N], float64"""
    routed_experts: Tensor
    """[R, T - 1, L, k]"""
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How a trainer's numbers differ from the engine's."""

    diverging_routers: float
    diverging_tokens: float
    kl: float
    """Mismatch KL by the trainer's own routers."""
    replayed_kl: float


def make_directory(
    path: Path, per_token: int, spread: float, seed: int, *, experts: int = EXPERTS
) -> Path:
    """Write a random mixture."""
    import transformers

    config: Any = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=spread,
        max_position_embeddings=256,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    directory = path / f"{per_token}-{spread}-{seed}-{experts}"
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_runner(directory: Path) -> Runner:
    """Open the directory with room for all turns."""
    model = open_model(directory, "auto")
    return model.make_runner(num_blocks=TURNS * TURN_BLOCKS, block_tokens=BLOCK_TOKENS)


def sample(runner: Runner) -> Sampled:
    """Sample all turns at once, with their routed experts."""
    random = np.random.default_rng(0)
    tokens = np.zeros((TURNS, PROMPT_TOKENS + NEW_TOKENS), np.int32)
    tokens[:, :PROMPT_TOKENS] = random.integers(0, VOCAB, (TURNS, PROMPT_TOKENS))
    logprobs, experts = [], []
    for step in range(NEW_TOKENS):
        end = PROMPT_TOKENS + step
        output = runner.step(decode_rows(tokens, step, reports_experts=True))
        tokens[:, end] = output.token_ids
        logprobs.append(output.logprobs)
        experts.append(np.stack([output.positions["routed_experts"][row] for row in range(TURNS)]))
    return Sampled(
        torch.from_numpy(tokens).long(),
        torch.from_numpy(np.stack(logprobs, 1)).double(),
        torch.from_numpy(np.concatenate(experts, 1)),
        experts[0][0, 0].nbytes,
    )


def decode_rows(tokens: Any, step: int, *, reports_experts: bool) -> list[EngineRow]:
    """Return the rows of a step; the first one reads the prompts."""
    end = PROMPT_TOKENS + step
    start = 0 if step == 0 else end - 1
    return [
        EngineRow(
            tokens[turn, start:end],
            start,
            list(range(turn * TURN_BLOCKS, (turn + 1) * TURN_BLOCKS)),
            RowSampling(1.0, 0, 1.0, turn, step),
            positions_from=start if reports_experts else None,
        )
        for turn in range(TURNS)
    ]


@torch.no_grad()
def measure(directory: Path, sampled: Sampled) -> Mismatch:
    """Compare the engine's numbers with those of ``transformers``."""
    import transformers

    trainer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16
    )
    trainer.eval()
    inputs, targets = sampled.token_ids[:, :-1], sampled.token_ids[:, 1:]

    def mismatch_kl() -> float:
        logprobs = trainer(inputs).logits.double().log_softmax(-1)
        of_tokens = logprobs.gather(-1, targets[..., None])[..., 0][:, PROMPT_TOKENS - 1 :]
        log_ratio = of_tokens - sampled.logprobs
        return measure_mismatch(log_ratio, torch.ones_like(log_ratio)).k3

    with record_routed_experts(trainer) as recorder:
        kl = mismatch_kl()
    own = recorder.routed_experts().view(sampled.routed_experts.shape)
    with replay_routed_experts(trainer, sampled.routed_experts):
        replayed_kl = mismatch_kl()
    diverges = (own.sort(-1).values != sampled.routed_experts.long().sort(-1).values).any(-1)
    return Mismatch(
        diverging_routers=float(diverges.double().mean()),
        diverging_tokens=float(diverges.any(-1).double().mean()),
        kl=kl,
        replayed_kl=replayed_kl,
    )


def floor_kl(path: Path, per_token: int, spread: float, seed: int) -> float:
    """Return the mismatch KL of a mixture that has only as many experts as each token uses, so that
    its routers cannot disagree: what the rounding of all other computation leaves."""
    directory = make_directory(path, per_token, spread, seed, experts=per_token)
    return measure(directory, sample(make_runner(directory))).kl


def decode_rate(runner: Runner, *, reports_experts: bool) -> float:
    """Return the decoded tokens per CPU-second."""
    tokens = np.zeros((TURNS, PROMPT_TOKENS + NEW_TOKENS), np.int32)
    runner.step(decode_rows(tokens, 0, reports_experts=reports_experts))
    started = process_time()
    for step in range(1, NEW_TOKENS):
        runner.step(decode_rows(tokens, step, reports_experts=reports_experts))
    return TURNS * (NEW_TOKENS - 1) / (process_time() - started)


def rows_of(path: Path) -> Iterator[Row]:
    """Return the whole table; models are written below ``path``."""
    for per_token, spread in CASES:
        case = f"{per_token}/{spread}"
        found = []
        for seed in range(MODELS):
            directory = make_directory(path, per_token, spread, seed)
            runner = make_runner(directory)
            sampled = sample(runner)
            found.append(measure(directory, sampled))
        for name in ("diverging_routers", "diverging_tokens"):
            share = statistics.median(getattr(each, name) for each in found)
            yield Row(f"{name}/{case}", share, "share")
        yield compared(
            f"mismatch_kl/{case}",
            "nats",
            statistics.median(each.replayed_kl for each in found),
            statistics.median(each.kl for each in found),
        )
        yield Row(
            f"floor_kl/{case}",
            statistics.median(floor_kl(path, per_token, spread, seed) for seed in range(MODELS)),
            "nats",
        )
        yield Row(f"bytes_per_token/{case}", sampled.bytes_per_token, "B")
        rates = (partial(decode_rate, runner, reports_experts=reports) for reports in (True, False))
        yield compared(f"decode_tokens_per_cpu_s/{case}", "1/s", *medians(RATE_RUNS, *rates))


def rows() -> Iterator[Row]:
    """Return the whole table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        yield from rows_of(Path(directory))


if __name__ == "__main__":
    main(__doc__, rows)
