"""Texts and bytes of single tokens: they join to the whole output, wherever characters are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.models import byte_level_tokenizer
from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.serving.openai.token_logprobs import chat_content, completion_logprobs


def _with_byte_fallback() -> Tokenizer:
    words = ["<s>", "▁", "a", "▁a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": _with_byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("a é日😀“<think>"), max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_tokens_of_an_output_join_to_its_text_and_bytes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    marked = text.replace(" ", "▁") if name == "byte fallback" else text
    ids = [i for i in tokenizer.encode(marked, add_special_tokens=False).ids if i is not None]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    added = TokenTexts(tokenizer).all(ids)
    assert "".join(each.text for each in added) == whole
    assert b"".join(each.raw for each in added).decode() == whole


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_tokens_that_are_no_characters_join_to_what_the_tokenizer_shows(ids: list[int]) -> None:
    added = TokenTexts(BYTE_LEVEL).all(ids)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=False)
    assert "".join(each.text for each in added) == whole


def test_log_probs_name_every_token_once_and_hold_all_bytes() -> None:
    """The four tokens of one character, each with rivals that are parts of characters, too."""
    ids = BYTE_LEVEL.encode("😀", add_special_tokens=False).ids
    assert len(ids) == 4
    rivals = BYTE_LEVEL.encode("é日", add_special_tokens=False).ids
    rows = [
        (token, -1.0, {token: -1.0, **dict.fromkeys(rivals, -2.0)})
        for token in ids
        if token not in rivals
    ]
    found = completion_logprobs(TokenTexts(BYTE_LEVEL), rows)
    assert found["tokens"] == ["", "", "", "😀"]
    assert found["text_offset"] == [0, 0, 0, 0]
    for (_, _, top), named in zip(rows, found["top_logprobs"], strict=True):
        assert len(named) == len(top)
    assert "bytes:\\xe6" in found["top_logprobs"][0]
    content = chat_content(TokenTexts(BYTE_LEVEL), rows)
    assert bytes(b for each in content for b in each["bytes"]).decode() == "😀"
    for entry, (token, _, top) in zip(content, rows, strict=True):
        own = entry["top_logprobs"][list(top).index(token)]
        assert (own["token"], own["bytes"]) == (entry["token"], entry["bytes"])
        assert all(each["bytes"] for each in entry["top_logprobs"])


def test_both_forms_of_log_probs_join_to_a_text_that_ends_within_a_character() -> None:
    ids = BYTE_LEVEL.encode("é😀", add_special_tokens=False).ids[:-1]
    rows = [(token, -1.0, {token: -1.0}) for token in ids]
    chat = chat_content(TokenTexts(BYTE_LEVEL), rows)
    completion = completion_logprobs(TokenTexts(BYTE_LEVEL), rows)
    assert "".join(each["token"] for each in chat) == "é\ufffd"
    assert "".join(completion["tokens"]) == BYTE_LEVEL.decode(ids)
    assert [each["token"] for each in chat] == completion["tokens"]
