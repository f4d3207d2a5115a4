"""Invalid sampling options are refused with their values."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sampling.test_sampling_options import VOCAB, draw, make_turn, random_logits
from tidegate.engine.sampling.options import OptionReader
from tidegate.errors import TurnRefused
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sampling import SamplingParams, TokenBias

KEYS = SamplingParams.__struct_fields__

REFUSALS = [
    ({"min_p": -0.1}, r"min_p must be in \[0, 1\] \(0 keeps all tokens\), got -0.1"),
    ({"min_p": float("nan")}, "min_p must be in .* got nan"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\] .* got 0.0"),
    ({"repetition_penalty": float("inf")}, "got inf"),
    ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\] .* got 2.5"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty must be .* got nan"),
    ({"logit_bias": [TokenBias(VOCAB, 1.0)]}, r"for token 23, outside the vocabulary \[0, 23\)"),
    ({"logit_bias": [TokenBias(3, float("-inf"))]}, "got -inf; exclude tokens with the processor"),
    ({"logit_bias": [TokenBias(3, 1.0), TokenBias(3, 2.0)]}, "names a token twice"),
    (
        {"min_tokens": 6},
        r"min_tokens must be in \[0, 5\], the turn.s limit of output tokens, got 6",
    ),
    ({"min_tokens": -1}, "min_tokens must be in .* got -1"),
    (
        {"min_tokens": 2, "stop_token_ids": list(range(VOCAB))},
        "every token of the vocabulary is one",
    ),
    ({"top_logprobs": VOCAB + 1}, r"top_logprobs must be in \[0, 23\] on this engine, got 24"),
    ({"top_logprobs": -1}, "got -1"),
    ({"stop_strings": [""]}, "a stop string must have 1 to 1000 characters, got 0"),
    ({"stop_strings": ["x"] * 65}, "a turn must have at most 64 stop_strings, got 65"),
    ({"stop_strings": ["x"]}, "was started without a model directory"),
    ({"logits_processors": ["{}"] * 17}, "a turn must have at most 16 logits_processors, got 17"),
]


@pytest.mark.parametrize(("options", "reported"), REFUSALS)
def test_an_invalid_option_is_refused_with_its_value(
    options: dict[str, Any], reported: str
) -> None:
    with pytest.raises(TurnRefused, match=reported):
        make_turn(SamplingParams(**({"max_tokens": 5} | options)), [1])


NUMBERS = st.one_of(st.floats(), st.sampled_from([0, 1, -1, 2, 1e-300, 1e300, 2**63]))
WHOLE = st.integers(-3, 30) | st.sampled_from([2**31, 2**63 - 1, -(2**63)])


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    asked=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 5),
        temperature=NUMBERS,
        top_k=WHOLE,
        top_p=NUMBERS,
        min_p=NUMBERS,
        repetition_penalty=NUMBERS,
        presence_penalty=NUMBERS,
        frequency_penalty=NUMBERS,
        logit_bias=st.lists(st.builds(TokenBias, WHOLE, NUMBERS), max_size=3),
        min_tokens=WHOLE,
        stop_token_ids=st.lists(WHOLE, max_size=3),
        stop_strings=st.lists(st.text(max_size=3), max_size=2),
        top_logprobs=WHOLE,
        raw_logprobs=st.booleans(),
        logits_processors=st.lists(
            st.text(max_size=9)
            | st.sampled_from(["allowed_tokens", "temperature_schedule"]).map(
                lambda name: json.dumps({"name": name, "arguments": {"token_ids": [3, 99]}})
            ),
            max_size=2,
        ),
        seed=st.integers(-(2**63), 2**64 - 1),
    ),
    kept=st.sets(st.sampled_from(sorted(SamplingParams.__struct_fields__))),
)
def test_any_options_are_refused_or_sampled_without_a_crash(
    asked: SamplingParams, kept: set[str]
) -> None:
    """Most options keep their defaults, or no example would pass the first check."""
    defaults = SamplingParams(max_tokens=5)
    chosen = {name: getattr(asked if name in kept else defaults, name) for name in KEYS}
    try:
        turn = make_turn(SamplingParams(**chosen), [5, 3, 5], [7])
    except TurnRefused:
        return
    output = draw([turn], random_logits(0))
    assert 0 <= output.token_ids[0] < VOCAB
    assert output.failures or -1e6 < output.logprobs[0] <= 0
    turn.append(int(output.token_ids[0]))


def test_top_logprobs_are_limited_by_the_size_of_a_step_message() -> None:
    reader = OptionReader(vocab_size=150_000, max_running_turns=4096)
    message = SubmitTurn(
        turn=1, token_ids=bytes(4), sampling=SamplingParams(max_tokens=2, top_logprobs=65)
    )
    with pytest.raises(TurnRefused, match=r"top_logprobs must be in \[0, 64\] on this engine"):
        reader.read(message, np.zeros(3, np.int32))
