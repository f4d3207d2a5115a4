"""Log-probabilities of given tokens from hidden states, without storing the logits.

The kernel exists because at T = 8192 and V = 151,936 the float32 logits are 5 GB, for 32 KB of
results.

The vocabulary is cut into parts that are merged at the end: per token and part, the maximum and
sums. One GPU program computes a part for a tile of tokens. Parts do not depend on T, so a token's
sum has one order in every batch. Products of bfloat16 numbers are exact in float32, in which they
are summed: a bfloat16 head on bfloat16 hidden states equals both widened to float32.

Sources: online softmax, Milakov & Gimelshein, arXiv:1805.02867; not storing the logits, Wijmans et
al., arXiv:2411.09009 (there for a loss).

Letters in shapes: T tokens, H hidden size, V vocabulary, Z parts of the vocabulary.
"""

import torch

from tidegate.kernels.optional_triton import jit, tl
from tidegate.kernels.triton_math import capped, product

VOCAB_PART = 4096
"""Vocabulary of one program: 38 parts for V = 151,936, which fill a GPU from 256 tokens on."""

TOKEN_TILE = 64
VOCAB_TILE = 128
"""Vocabulary entries of a program's tile: with TOKEN_TILE, 64 float32 sums for each of 128 threads.
"""

HIDDEN_TILE_BYTES = 128
"""64 hidden numbers of bfloat16: with both tiles 24 KB a step, several of which are in flight."""


@torch.no_grad()
def head_logprobs_triton(
    hidden: torch.Tensor,
    head: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return ``log p(token_ids[t])`` under ``softmax(head @ hidden[t] / temperature)``.

    Runs on a CPU only with Triton's interpreter.

    Args:
        hidden: [T, H], normed.
        head: [V, H], of ``hidden``'s dtype, both contiguous.
        token_ids: [T], int64, each in [0, V).
        temperature: above 0; logits are divided by it.
        soft_cap: logits first become ``soft_cap * tanh(logit / soft_cap)``, as in Gemma 2.

    Returns:
        [T], float32, natural log; products and sums are float32 whatever the dtypes. No gradient.
    """
    _refuse(hidden, head, token_ids, temperature)
    if hidden.dtype != head.dtype or not (hidden.is_contiguous() and head.is_contiguous()):
        raise ValueError(
            f"hidden and head must be contiguous and of one dtype, "
            f"got {hidden.dtype} and {head.dtype}"
        )
    (tokens, width), vocab = hidden.shape, head.shape[0]
    parts = -(-vocab // VOCAB_PART)
    sums = hidden.new_empty((3, parts, tokens), dtype=torch.float32)
    if tokens:
        # Tokens are the fast axis: programs of one part run together and share its reads.
        _head_logprobs_kernel[(-(-tokens // TOKEN_TILE), parts)](
            hidden, head, token_ids, *sums,
            tokens, vocab, 1.0 / temperature, soft_cap or 0.0,
            WIDTH=width, PART=VOCAB_PART, TOKENS=TOKEN_TILE, VOCAB=VOCAB_TILE,
            HIDDEN=HIDDEN_TILE_BYTES // hidden.element_size(), CAPPED=soft_cap is not None,
        )  # fmt: skip
    peaks, totals, chosen = sums  # each [Z, T]
    peak = peaks.amax(0)
    total = (totals * torch.exp(peaks - peak)).sum(0)
    logprobs: torch.Tensor = chosen.sum(0) - (peak + total.log())
    return logprobs


def _refuse(
    hidden: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, temperature: float
) -> None:
    shapes = list(hidden.shape), list(head.shape), list(token_ids.shape)
    if hidden.ndim != 2 or hidden.shape[1:] != head.shape[1:] or len(shapes[0]) != len(shapes[1]):
        raise ValueError(f"expected hidden [T, H] and head [V, H], got {shapes[0]} and {shapes[1]}")
    if token_ids.shape != hidden.shape[:1]:
        raise ValueError(f"expected one of token_ids for each of {shapes[0][0]}, got {shapes[2]}")
    if not temperature > 0:
        raise ValueError(f"temperature divides logits and must be > 0, got {temperature}")


@jit(do_not_specialize=["tokens"])
def _head_logprobs_kernel(
    hidden_ptr,  # [T, WIDTH]
    head_ptr,  # [V, WIDTH]
    token_ids_ptr,  # [T]
    peaks_ptr,  # [Z, T] out: the largest logit of a part
    totals_ptr,  # [Z, T] out: sum of exp(logit - peak)
    chosen_ptr,  # [Z, T] out: the given token's logit, 0 where another part has it
    tokens,
    vocab,
    inverse_temperature,
    soft_cap,
    WIDTH: tl.constexpr,  # H
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program per tile of tokens and part of the vocabulary."""
    part = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = t < tokens
    h = tl.arange(0, HIDDEN)
    token_id = tl.load(token_ids_ptr + t, mask=is_token, other=-1)
    hidden_at = hidden_ptr + t.to(tl.int64)[:, None] * WIDTH + h[None, :]
    peak = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    chosen = tl.zeros([TOKENS], tl.float32)
    for first in range(part * PART, tl.minimum((part + 1) * PART, vocab), VOCAB):
        v = first + tl.arange(0, VOCAB)
        is_in_vocab = v < vocab
        head_at = head_ptr + v.to(tl.int64)[None, :] * WIDTH + h[:, None]
        logit = tl.zeros([TOKENS, VOCAB], tl.float32)
        for begin in range(0, WIDTH, HIDDEN):
            inside = h < WIDTH - begin
            a = tl.load(hidden_at + begin, mask=is_token[:, None] & inside[None, :], other=0.0)
            b = tl.load(head_at + begin, mask=inside[:, None] & is_in_vocab[None, :], other=0.0)
            logit += product(a, b)
        if CAPPED:
            logit = capped(logit, soft_cap)
        logit = logit * inverse_temperature
        is_chosen = v[None, :] == token_id[:, None]
        chosen += tl.sum(tl.where(is_chosen, logit, 0.0), axis=1)
        bounded = tl.where(is_in_vocab[None, :], logit, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(bounded, axis=1))
        weight = tl.exp(bounded - new_peak[:, None])
        total = total * tl.exp(peak - new_peak) + tl.sum(weight, axis=1)
        peak = new_peak
    at = part.to(tl.int64) * tokens + t
    tl.store(peaks_ptr + at, peak, mask=is_token)
    tl.store(totals_ptr + at, total, mask=is_token)
    tl.store(chosen_ptr + at, chosen, mask=is_token)
