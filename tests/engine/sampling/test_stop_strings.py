"""A turn ends with the token that completes a stop string."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models import make_model_directory
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling.stop_strings import INCOMPLETE_TOKENS_MAX, StopStrings
from tidegate.errors import TurnRefused

SPLIT = "NDæ"
"""Token of two letters and the first byte of 日, as ByteLevel writes it."""

MERGED = ["ab", "abc", "END", "ND", "\n\n", "日é", "日", "</"]
"""Tokens of more than one byte; all others are one byte."""


def byte_level() -> Tokenizer:
    """Tokenizer of arbitrary bytes, one or a few per token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: n for n, text in enumerate([*alphabet, SPLIT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MERGED])
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Tokenizer that writes a space before a word's first token, except at the start of a text."""
    words = ["▁a", "▁b", "b", "c", "▁"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "c"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


BYTES = byte_level()


def id_of(word: str, tokenizer: Tokenizer = BYTES) -> int:
    token_id = tokenizer.token_to_id(word)
    assert token_id is not None
    return int(token_id)


def bytes_of(text: str) -> list[int]:
    """Return one token per byte."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [id_of(c) for c in encoder.pre_tokenize_str(text)[0][0]]


def stops_at(strings: list[str], token_ids: list[int], prompt_ids: list[int] = []) -> int | None:  # noqa: B006
    stop = StopStrings(BYTES, strings, prompt_ids)
    return next((n for n, token_id in enumerate(token_ids) if stop.completes(token_id)), None)


def test_a_stop_string_is_found_across_tokens_and_inside_of_one() -> None:
    end = id_of("END")
    assert stops_at(["END"], bytes_of("some END")) == 7
    assert stops_at(["END"], [*bytes_of("x"), end]) == 1
    assert stops_at(["ND x"], [end, *bytes_of(" x")]) == 2
    assert stops_at(["N"], [*bytes_of("a"), end]) == 1
    assert stops_at(["ENDE"], [end, *bytes_of("END")]) == 1
    assert stops_at(["end"], [end]) is None


def test_a_character_of_many_bytes_counts_once_it_is_whole() -> None:
    text = bytes_of("日本é")
    assert len(text) == 8
    assert stops_at(["本"], text) == 5
    assert stops_at(["本é"], text) == 7
    assert stops_at(["é"], [*bytes_of("é")[:1], id_of("日é")]) == 1
    assert stops_at(["�"], text) is None


def test_a_stop_string_before_a_character_that_has_only_begun_ends_the_turn_at_once() -> None:
    first, *others = bytes_of("日")
    split = id_of(SPLIT)
    assert stops_at(["END"], [*bytes_of("E"), split, *others]) == 1
    assert stops_at(["D日"], [*bytes_of("E"), split, *others]) == 3
    assert stops_at(["END", "D日"], [*bytes_of("N"), split, *others]) == 3
    assert stops_at(["日N"], [first, *others, split]) == 3
    assert stops_at(["ED"], [*bytes_of("E"), first, split, *others]) is None


def test_the_prompts_end_does_not_complete_a_stop_string() -> None:
    assert stops_at(["END"], bytes_of("ND"), bytes_of("long before E")) is None
    assert stops_at(["ND"], bytes_of("ND"), bytes_of("E")) == 1


def test_a_special_token_can_be_named_as_text() -> None:
    special = id_of("<|im_end|>")
    assert stops_at(["<|im_end|>"], [*bytes_of("so"), special]) == 2


def test_a_space_that_only_the_token_before_makes_visible_counts() -> None:
    tokenizer = metaspace()
    a, b = id_of("▁a", tokenizer), id_of("▁b", tokenizer)
    stop = StopStrings(tokenizer, [" b"], [a])
    assert stop.completes(b)
    assert not StopStrings(tokenizer, [" b"], []).completes(b)  # the text begins with it


def test_invalid_utf8_bytes_do_not_delay_stop_strings_for_ever() -> None:
    lone = bytes_of("日")[1]  # the middle of a character
    end = bytes_of("END")
    assert stops_at(["END"], [*[lone] * 40, *end]) == 42
    stop = StopStrings(BYTES, ["END"], [])
    for _ in range(1000):
        stop.completes(lone)
    assert len(stop._ids) <= 2 * INCOMPLETE_TOKENS_MAX


BEGUN = "ND日"
"""Text that :data:`SPLIT` begins."""

PIECES = st.one_of(st.text(alphabet="abcEND日é\n</ ", min_size=1, max_size=6), st.just(BEGUN))
TEXTS = st.lists(PIECES, min_size=1, max_size=8).map("".join)
STRINGS = st.lists(st.text(alphabet="abcEND日é\n", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    text=TEXTS,
    strings=STRINGS,
    data=st.data(),
)
def test_a_turn_ends_where_its_whole_text_first_holds_a_stop_string(
    text: str, strings: list[str], data: st.DataObject
) -> None:
    token_ids: list[int] = []
    remaining = text
    while remaining:
        fitting = [m for m in [*MERGED, BEGUN] if remaining.startswith(m)] + [remaining[0]]
        piece = data.draw(st.sampled_from(fitting))
        if piece == BEGUN:
            token_ids += [id_of(SPLIT), *bytes_of("日")[1:]]
        else:
            token_ids += [id_of(piece)] if piece in MERGED else bytes_of(piece)
        remaining = remaining[len(piece) :]
    texts = [BYTES.decode(token_ids[:n]) for n in range(1, len(token_ids) + 1)]
    expected = next(
        (n for n, output in enumerate(texts) if any(s in output for s in strings)), None
    )
    assert stops_at(strings, token_ids) == expected

    moved_at = data.draw(st.integers(0, len(token_ids) if expected is None else expected))
    moved = StopStrings(BYTES, strings, [])
    moved.add_output(token_ids[:moved_at])
    ends = (n for n in range(moved_at, len(token_ids)) if moved.completes(token_ids[n]))
    assert next(ends, None) == expected


def test_a_model_without_a_tokenizer_serves_no_text_and_says_why(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    tokenizer = ModelTokenizer(model)
    assert tokenizer.get() is tokenizer.get()
    (model / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(TurnRefused, match=r"tokenizer\.json can't be read"):
        ModelTokenizer(model).get()
    (model / "tokenizer.json").unlink()
    with pytest.raises(TurnRefused, match=r"tokenizer\.json is missing; .* use stop_token_ids"):
        ModelTokenizer(model).get()
