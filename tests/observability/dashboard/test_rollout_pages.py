"""JSON of a rollout's page: each token's text, turn, engine and version."""

import json
import math
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.observability.recorded import recorded_rollout, recorded_turn
from tests.orchestrator.episodes.chat_templates import chat_tokenizer
from tidegate.observability.dashboard.rollout_pages import (
    TOKENS_SHOWN_MAX,
    rollout_page,
    token_texts,
)
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn
from tidegate.orchestrator.core.provenance import KvRange, VersionSpan

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def rollout(token_ids: list[int], *turns: RecordedTurn, task: str = "") -> RecordedRollout:
    logprobs = [-0.123456789] * len(token_ids)
    about: dict[str, Any] = {"token_ids": token_ids, "logprobs": logprobs, "task": task}
    return recorded_rollout(7, *turns, reward=math.nan, **about)


TWO_TURNS = rollout(
    list(range(20)),
    recorded_turn(
        4,
        6,
        spans=(VersionSpan(2, 0, 4, "a", KvRange(2, 2)), VersionSpan(3, 4, 6, "b", KvRange(2, 3))),
    ),
    recorded_turn(12, 5, spans=(VersionSpan(3, 0, 5, "b", None),), reward=0.25),
)


def test_every_token_is_in_one_segment_with_its_provenance() -> None:
    page = rollout_page(TWO_TURNS, None)
    assert page["segments"] == [
        [0, 4, -1, -1, "", ""],
        [4, 8, 0, 2, "a", "fresh"],
        [8, 10, 0, 3, "b", "mixed(2, 3)"],
        [10, 12, -1, -1, "", ""],
        [12, 17, 1, 3, "b", "unknown"],
        [17, 20, -1, -1, "", ""],
    ]
    assert [each["versions"] for each in page["turns"]] == [
        [[2, 4, "a"], [3, 2, "b"]],
        [[3, 5, "b"]],
    ]
    assert [each["reward"] for each in page["turns"]] == [None, 0.25]


def test_nan_and_infinity_become_null() -> None:
    page = rollout_page(TWO_TURNS, None)
    assert page["reward"] is None
    assert page["logprobs"][0] == pytest.approx(-0.12346)
    json.dumps(page, allow_nan=False)


@pytest.mark.parametrize("text", ["plain words", "grüße, 水門 and 🌊🌊!", "a\n\n\tb\r\n", HOSTILE])
@pytest.mark.parametrize("start", [0, 5])
def test_token_texts_join_to_the_whole_text(text: str, start: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    texts = token_texts(ids, tokenizer, start=start, end=len(ids))
    whole = token_texts(ids, tokenizer, start=0, end=len(ids))
    assert "".join(whole) == text
    assert texts == whole[start:]


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ok🌊", add_special_tokens=False).ids[:-1]
    assert token_texts(ids, tokenizer, start=0, end=len(ids)) == ["o", "k", "", "", "\ufffd"]


def test_a_turns_tools_are_named_and_its_output_stays_text() -> None:
    tokenizer = chat_tokenizer()
    output = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = tokenizer.encode(output, add_special_tokens=False).ids
    turn = recorded_turn(0, len(ids), spans=(VersionSpan(0, 0, len(ids), "a", None),))
    shown = rollout(ids, turn, task=HOSTILE)
    page = rollout_page(shown, tokenizer)
    assert page["turns"][0]["tools"] == ["add"]
    assert page["task"] == HOSTILE


def test_a_long_context_is_returned_in_adjacent_parts() -> None:
    long = rollout([5] * (TOKENS_SHOWN_MAX + 10))
    first = rollout_page(long, None)
    second = rollout_page(long, None, start=first["end"])
    assert len(first["texts"]) == TOKENS_SHOWN_MAX
    assert (second["start"], second["end"], len(second["logprobs"])) == (20_000, 20_010, 10)
    assert rollout_page(long, None, start=10**9)["texts"] == []
