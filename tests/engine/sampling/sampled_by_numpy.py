"""Reference of all sampling options in numpy: float64, one token at a time.

Written from the formulas in ``SamplingParams``, with loops where the engine has columns.
"""

import numpy as np
import numpy.typing as npt

from tidegate.transport.sampling import SamplingParams

Floats = npt.NDArray[np.float64]


def distribution(
    logits: npt.NDArray[np.float32], requested: SamplingParams, prompt: list[int], output: list[int]
) -> Floats:
    """Return the probabilities [V] of the next output token; no processors."""
    x = penalised(logits.astype(np.float64), requested, prompt, output)
    if requested.temperature == 0:
        return softmax(x)
    x = x / requested.temperature
    p = softmax(x)
    x[p < requested.min_p * p.max()] = -np.inf
    if requested.top_k:
        x[x < np.sort(x)[::-1][min(requested.top_k, len(x)) - 1]] = -np.inf
    if requested.top_p < 1:
        p = softmax(x)
        kept, mass = [], 0.0
        for token in np.argsort(-p, kind="stable"):
            if mass >= requested.top_p:
                break
            kept.append(token)
            mass += p[token]
        x[np.setdiff1d(np.arange(len(x)), kept)] = -np.inf
    return softmax(x)


def penalised(x: Floats, requested: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """Apply steps 1 to 3."""
    for one in requested.logit_bias:
        x[one.token_id] += one.bias
    if len(output) < requested.min_tokens:
        x[requested.stop_token_ids] = -np.inf
    for token in set(prompt + output):
        r = requested.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= requested.frequency_penalty * output.count(token) + requested.presence_penalty
    return x


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())
