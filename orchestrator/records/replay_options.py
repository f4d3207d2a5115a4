"""What do a turn's penalties, biases and processors make of logits? Said again, for the audit.

Written token by token from ``SamplingParams``'s formulas, with `transformers`' own penalty and none
of the engine's code. Knows the processors whose meaning is fixed; those of users, and grammars, it
doesn't: :func:`replay_plan.is_replayable` tells.

Letters in shapes: N tokens, V vocabulary.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tidegate.orchestrator.records.replay_plan import Segment
from tidegate.transport.messages import SamplingParams
from tidegate.transport.sampling import Processor

Tokens = npt.NDArray[np.int32]


def edited(logits: torch.Tensor, segment: Segment, context: Tokens, first: int) -> torch.Tensor:
    """Logits [N, V] after all that comes before temperature, from the segment's token ``first`` on.

    Rows whose turn asks for none of it are given back as they are.
    """
    options = segment.sampling.options
    if options is None:
        return logits
    start = segment.sampling.start
    rows = []
    for n, row in enumerate(logits):
        position = segment.position + first + n
        rows.append(_edited_row(row, options, context[:start], context[start:position]))
    return torch.stack(rows)


def _edited_row(
    x: torch.Tensor, options: SamplingParams, prompt: Tokens, output: Tokens
) -> torch.Tensor:
    x = x.clone()
    for one in options.logit_bias:
        x[one.token_id] += one.bias
    if len(output) < options.min_tokens:
        x[[t for t in options.stop_token_ids if 0 <= t < len(x)]] = -torch.inf
    if options.repetition_penalty != 1:
        penalty: Any = transformers.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        seen = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
        x = torch.as_tensor(penalty(seen[None], x[None])[0])
    counts = torch.from_numpy(np.bincount(output, minlength=len(x)).astype(np.float32))
    x = x - options.frequency_penalty * counts - options.presence_penalty * (counts > 0)
    for text in options.processors:
        x = _processed(x, Processor.from_str(text), len(output))
    return x


def _processed(x: torch.Tensor, processor: Processor, index: int) -> torch.Tensor:
    arguments = processor.arguments
    if processor.name == "temperature_schedule":
        first, last = arguments["initial"], arguments["final"]
        share = min(1.0, index / arguments["warmup_tokens"])
        return x / float(first + (last - first) * share)
    named = torch.zeros(len(x), dtype=torch.bool)
    named[arguments["token_ids"]] = True
    if processor.name == "allowed_tokens":
        named = ~named
    return x.masked_fill(named, -torch.inf)
