"""Grammars over tokenizers of several kinds: output that a grammar allows, whatever is drawn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.models import byte_level_tokenizer
from tests.orchestrator.episodes.chat_templates import CHATML, GLM, MINIMAX, QWEN_CODER
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling.grammar import Grammars
from tidegate.engine.sampling.logits import ProcessorSetup, TurnTokens
from tidegate.orchestrator.episodes.forced_calls import forced_call
from tidegate.orchestrator.episodes.tool_calls import parse_reply
from tidegate.transport.sampling import LogitsProcessor

pytestmark = pytest.mark.wire  # grammars are compiled in a process of their own

pytest.importorskip("llguidance")

GLM_AND_MINIMAX = (
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)
TOKENIZERS = {
    "qwen": byte_level_tokenizer(*GLM_AND_MINIMAX),
    "smollm2": byte_level_tokenizer(splits_digits=True),
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "enum": [1, 20]},
                    "b": {"type": "array", "enum": [["é😀"], ["<think>"]]},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
TOKENS_MAX = 400


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    grammars = Grammars()
    yield grammars
    grammars.close()


def drawn(
    grammars: Grammars, processor: LogitsProcessor, tokenizer: Tokenizer, path: Path, seed: int
) -> tuple[str, list[int]]:
    """Return what a model of random logits writes under a grammar until it stops, and its tokens.

    White space has a lower logit, because JSON may have any amount of it.
    """
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + 8
    stop_id = tokenizer.token_to_id("<|im_end|>") or 0
    setup = ProcessorSetup(size, (stop_id,), ModelTokenizer(path))
    make = {"grammar": grammars.grammar, "json_schema": grammars.json_schema}[processor.name]
    edit = make(dict(processor.arguments), setup)
    rng = np.random.default_rng(seed)
    blanks = [n for n in range(size - 8) if not tokenizer.decode([n]).strip()]
    written: list[int] = []
    while len(written) < TOKENS_MAX:
        logits = torch.from_numpy(rng.gumbel(size=size).astype(np.float32))
        logits[blanks] -= 6.0
        edit(logits, TurnTokens(np.zeros(1, np.int32), np.array(written, np.int32)))
        token_id = int(logits.argmax())
        if token_id == stop_id:
            break
        written.append(token_id)
    return tokenizer.decode(written, skip_special_tokens=False), written


def lark(text: str) -> LogitsProcessor:
    return LogitsProcessor("grammar", {"lark": text})


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_tag_that_is_an_added_token_is_text_like_any_other(
    grammars: Grammars, tmp_path: Path, name: str, seed: int
) -> None:
    tokenizer = TOKENIZERS[name]
    expected = '<think>the é😀</think>{"x": 1}<tool_call>'
    choice = lark(f"start: {json.dumps(expected, ensure_ascii=False)}")
    text, ids = drawn(grammars, choice, tokenizer, tmp_path, seed)
    assert text == expected
    assert ids[0] == tokenizer.token_to_id("<think>")  # as the model was trained to write it
    pattern = lark(r"start: /<think>[a-z]{3}<\/think>[0-9]{2}/")
    text, _ = drawn(grammars, pattern, tokenizer, tmp_path, seed)
    assert text[:7] + text[10:18] == "<think></think>"
    assert text[18:].isdigit()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_json_constant_may_be_such_a_tag(grammars: Grammars, tmp_path: Path, name: str) -> None:
    schema = {"const": ["<tool_call>", "é😀"]}
    constant = LogitsProcessor("json_schema", {"schema": schema})
    text, _ = drawn(grammars, constant, TOKENIZERS[name], tmp_path, 0)
    assert json.loads(text) == schema["const"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", [CHATML, QWEN_CODER, GLM, MINIMAX])
def test_a_forced_call_is_written_by_a_tokenizer_that_has_its_tags(
    grammars: Grammars, tmp_path: Path, name: str, template: str
) -> None:
    forced = forced_call("required", TOOLS, template)
    for seed in range(2):
        text, _ = drawn(grammars, forced, TOKENIZERS[name], tmp_path, seed)
        [call] = parse_reply(text, {"add": TOOLS[0]["function"]["parameters"]}).tool_calls
        assert call.name == "add"
        assert call.arguments.keys() == {"a", "b"}


def test_text_in_a_grammar_is_never_a_special_token(grammars: Grammars, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["qwen"]
    text, ids = drawn(grammars, lark('start: "a<|im_end|>b"'), tokenizer, tmp_path, 0)
    assert text == "a<|im_end|>b"
    assert tokenizer.token_to_id("<|im_end|>") not in ids


def test_a_lark_grammar_names_added_tokens_special_or_not(
    grammars: Grammars, tmp_path: Path
) -> None:
    named = lark('start: <think> "<think>" /<think>/ <|im_start|>  // <think>')
    text, ids = drawn(grammars, named, TOKENIZERS["qwen"], tmp_path, 0)
    assert text == "<think><think><think><|im_start|>"
    assert ids[0] == TOKENIZERS["qwen"].token_to_id("<think>")


def test_a_tokenizer_that_writes_a_space_before_a_text_forces_none(
    grammars: Grammars, tmp_path: Path
) -> None:
    letters = ["</s>", "▁", *"abc", "ab", "abc", "▁abc"]
    words = letters + [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("a", "b"), ("ab", "c"), ("▁", "abc")]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(fallback)
    tokenizer.add_special_tokens(["</s>"])
    text, ids = drawn(grammars, lark('start: "abc é"'), tokenizer, tmp_path, 0)
    assert text == "abc é"
    assert ids[0] == vocab["abc"]
