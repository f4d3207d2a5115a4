"""Which tokens does a grammar allow next? Asks llguidance, an optional library, token by token.

Schemas and grammars are its own kinds: https://github.com/guidance-ai/llguidance. A turn may end,
by one of its stop tokens, exactly where the grammar is complete. Knows no other option.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from tidegate.engine.sampling.logits import LogitProcessor, ProcessorSetup, TurnTokens
from tidegate.errors import TurnRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_BYTES_MAX = 64 * 1024
"""Of a grammar or schema, as it is written."""

COMPILER_STACK_BYTES = 64 * 1024 * 1024
"""Enough for 93 kB of rules that each name the next."""

GRAMMARS_KEPT_MAX = 64
"""Compiled ones: a group's rollouts mostly have one in common. One of a kilobyte takes some ms."""


class _Schema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool


class _Lark(msgspec.Struct, forbid_unknown_fields=True):
    lark: str


def json_schema(arguments: dict[str, Any], setup: ProcessorSetup) -> LogitProcessor:
    """The output is JSON that fits ``schema``."""
    schema = msgspec.convert(arguments, _Schema).schema
    library = _library()
    return _Constrained(library.grammar_from_json_schema(json.dumps(schema)), setup)


def grammar(arguments: dict[str, Any], setup: ProcessorSetup) -> LogitProcessor:
    """The output is a text of the Lark grammar ``lark``."""
    library = _library()
    return _Constrained(library.grammar_from_lark(msgspec.convert(arguments, _Lark).lark), setup)


class _Constrained:
    """One turn's place in a grammar."""

    def __init__(self, text: str, setup: ProcessorSetup) -> None:
        if not setup.stop_token_ids:
            raise ValueError("the turn has no stop token to end with where the grammar is complete")
        words = _words(setup.tokenizer.get(), setup.vocab_size, setup.stop_token_ids[0])
        self._matcher = _compiled(words, text).deep_copy()
        self._stops = torch.tensor(setup.stop_token_ids)
        self._ends = torch.tensor(words.eos_tokens)
        self._read_tokens = 0
        """Of the output."""

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        matcher = self._matcher
        matcher.consume_tokens(turn.output[self._read_tokens :].tolist())
        self._read_tokens = len(turn.output)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        allowed = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little"))
        allowed[self._ends] = 0  # how the tokenizer ends texts, which need not be how the turn does
        allowed[self._stops] = int(matcher.is_accepting())
        logits.masked_fill_(allowed == 0, -torch.inf)


def _library() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise TurnRefused(
            f"grammars and JSON schemas need llguidance where engines run ({error}); "
            f"pip install 'tidegate[grammar]'"
        ) from None
    return LLMatcher


@lru_cache(maxsize=2)  # an engine has one tokenizer; reading 150,000 words takes a second
def _words(tokenizer: Tokenizer, vocab_size: int, end: int) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=end)
    except ValueError:  # a decoder that it doesn't know: then each token is what it is by itself
        wrapper = TokenizerWrapper(_SingleWords(tokenizer, vocab_size, end))
        return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=end)


class _SingleWords:
    """A tokenizer whose tokens are written alike wherever they stand, as llguidance reads one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = None
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        self.tokens = [self._tokenizer.decode([n]).encode() for n in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@lru_cache(maxsize=GRAMMARS_KEPT_MAX)
def _compiled(words: "LLTokenizer", text: str) -> "LLMatcher":
    if len(text.encode()) > GRAMMAR_BYTES_MAX:
        raise ValueError(
            f"it has {len(text.encode())} bytes, and may have {GRAMMAR_BYTES_MAX}; ask for less of "
            f"the output's form"
        )
    library = _library()
    matcher = _on_deep_stack(lambda: library(words, text, log_level=0))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _on_deep_stack(work: Callable[[], "LLMatcher"]) -> "LLMatcher":
    """The library compiles by recursion, and one too deep ends the process: rules that each name
    the next were seen to exhaust 8 MiB with 59 kB of them."""
    before = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result()
    finally:
        threading.stack_size(before)
