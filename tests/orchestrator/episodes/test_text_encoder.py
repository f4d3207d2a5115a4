"""Limits of encoding: texts that no context holds, and tokenizers whose expressions backtrack."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.models import byte_level_tokenizer
from tests.orchestrator.episodes.talking import Talk, user
from tidegate.errors import ChatRefused, ContextFull, ModelError
from tidegate.orchestrator.episodes import model_files
from tidegate.orchestrator.episodes.model_files import LONG_CHARACTERS, TextEncoder, read_tokenizer

WORDS = ["<s>", "\u2581", *map(chr, range(33, 127)), "é", "the", "\u2581the", "\u2581\u2581\u2581"]


def _composing() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _of_sentencepiece(**options: bool) -> Tokenizer:
    words = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256)), "th", "\u2581\u2581"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581")]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<s>", **options))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def _stripping() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


def _without_spaces() -> Tokenizer:
    tokenizer = _of_sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level_tokenizer(),
    "bytes of composed characters": _composing(),
    "marks that take white space": _stripping(),
    "characters, else bytes": _of_sentencepiece(byte_fallback=True),
    "characters, else one for all": _of_sentencepiece(fuse_unk=True),
    "without spaces": _without_spaces(),
}
MARKS = ["<mask>", "<|im_end|>", "<think>"]
COMPOSED = ["é", "e\u0301", "\u1112\u1161\u11ab", "\u212a", "漢字", "🙂"]
PIECES = ["the ", " the", "   ", "the", *COMPOSED, *MARKS]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(parts=TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_never_has_fewer_tokens_than_is_said(name: str, parts: list[str]) -> None:
    encoder, text = TextEncoder(TOKENIZERS[name]), "".join(parts)
    assert encoder.fewest_tokens(text) <= len(encoder.encode(text))


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "without spaces"])
def test_a_long_english_text_is_known_to_have_many_tokens(name: str) -> None:
    encoder = TextEncoder(TOKENIZERS[name])
    text = "All happy families are alike; each unhappy family is unhappy in its own way. " * 50
    tokens = len(encoder.encode(text))
    assert tokens / 8 < encoder.fewest_tokens(text) <= tokens


async def test_a_message_or_text_that_no_context_holds_is_refused_before_it_is_tokenised(
    tmp_path: Path,
) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.context_tokens = 1000
    text = "far too long " * LONG_CHARACTERS
    talk.engine.words.append("never said")
    with pytest.raises(ContextFull) as of_messages:
        await talk.episode.generate(messages=[user(text)])
    with pytest.raises(ContextFull) as of_text:
        talk.episode.append(text)
    fewest = talk.model.encoder.fewest_tokens(text)
    assert fewest < len(talk.model.encoder.encode(text))  # it was not counted by tokenising
    assert of_text.value.tokens == fewest
    assert of_messages.value.tokens >= fewest
    assert of_text.value.tokens_max == of_messages.value.tokens_max == 1000
    assert not talk.episode.num_tokens


async def test_tokens_of_earlier_turns_count_when_a_text_is_refused(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml")
    messages = [user("first")]
    messages.append(await talk.say("answer<|im_end|>", messages))
    text = "an observation " * (LONG_CHARACTERS // 10)
    before, fewest = talk.episode.num_tokens, talk.model.encoder.fewest_tokens(text)
    talk.engine.context_tokens = fewest + before
    with pytest.raises(ContextFull) as refused:
        await talk.episode.generate(messages=[*messages, user(text)])
    assert refused.value.tokens > fewest + before
    assert talk.episode.num_tokens == before


# ---------------------------------------------------------------- regular expressions


def _split_by(pattern: str) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), tokenizer.pre_tokenizer]
    )
    return tokenizer


def test_a_pattern_that_backtracks_for_long_is_given_up_and_occupies_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = TextEncoder(_split_by("a+a+[bc]"))
    monkeypatch.setattr(model_files, "ENCODE_S", 0.02)
    with pytest.raises(ChatRefused, match="took 0 s and more"):
        encoder.encode("a" * 1200)
    with pytest.raises(ChatRefused, match="still at an earlier text"):
        encoder.encode("short")
    (given_up,) = encoder._given_up
    assert len(given_up.result(60)) == 1200
    monkeypatch.setattr(model_files, "ENCODE_S", 60.0)
    assert encoder.encode("short") == TextEncoder(byte_level_tokenizer()).encode("short")


def test_texts_are_refused_until_all_that_were_given_up_together_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = TextEncoder(_split_by("a+a+[bc]"))
    monkeypatch.setattr(model_files, "ENCODE_S", 0.02)
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(encoder.encode, "a" * length) for length in (2000, 1000)]:
            assert isinstance(each.exception(60), ChatRefused)
    longer, shorter = sorted(encoder._given_up, key=lambda each: each.done())
    shorter.result(60)
    while not longer.done():
        with pytest.raises(ChatRefused, match="still at an earlier text"):
            encoder.encode("b")
    monkeypatch.setattr(model_files, "ENCODE_S", 60.0)
    assert encoder.encode("b")


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
async def test_a_match_that_the_library_gives_up_is_an_error_of_the_text(
    part: str, tmp_path: Path
) -> None:
    tokenizer = _split_by("(a+)+$") if part == "pre_tokenizer" else byte_level_tokenizer()
    if part == "normalizer":
        tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "x")
    encoder = TextEncoder(tokenizer)
    with pytest.raises(ChatRefused, match=r"can't encode a text of 41 characters: .*limit"):
        encoder.encode("a" * 40 + "!")
    assert encoder.encode("b") == TextEncoder(byte_level_tokenizer()).encode("b")


def test_a_decoder_with_a_regular_expression_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(path))
    read_tokenizer(path)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("(a+)+$"), "x")])
    tokenizer.save(str(path))
    with pytest.raises(ModelError, match="a decoder with a regular expression"):
        read_tokenizer(path)
