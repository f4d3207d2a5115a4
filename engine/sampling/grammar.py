"""Structured output: logits processors for JSON schemas and Lark grammars, by llguidance.

Used by ``ProcessorRegistry`` as the processors ``json_schema`` and ``grammar``. Schemas and
grammars are of llguidance's kinds, https://github.com/guidance-ai/llguidance, an optional
dependency. A turn may sample one of its stop tokens exactly where the grammar is complete. Built on
``grammar_compiler.py``, which compiles each grammar under limits, and the interface of
``logits.py``.
"""

import json
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from tidegate.engine.sampling.grammar_compiler import (
    COMPILE_WALL_S,
    HELPER_START_S,
    GrammarCompiler,
    Vocabulary,
    library,
    tokens_of,
)
from tidegate.engine.sampling.logits import ProcessorSetup, TurnLogitsProcessor, TurnTokens
from tidegate.transport.sampling import with_bounded_space

if TYPE_CHECKING:
    from llguidance import LLMatcher


class _SchemaArguments(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool


class _LarkArguments(msgspec.Struct, forbid_unknown_fields=True):
    lark: str


class Grammars:
    """The processors ``json_schema`` and ``grammar`` of one engine, with a shared compiler."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler()

    def json_schema(self, arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
        """Make a processor that constrains the output to JSON that fits ``schema``."""
        return self._make_processor(_schema_text(arguments), setup)

    def grammar(self, arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
        """Make a processor that constrains the output to the Lark grammar ``lark``."""
        return self._make_processor(_lark_text(arguments), setup)

    def prepare(
        self, name: str, arguments: dict[str, Any], setup: ProcessorSetup
    ) -> "Future[LLMatcher] | None":
        """Start compiling the grammar of processor ``name``; None if it is not a grammar processor.

        Once the returned future is done, and while the caller holds it, ``json_schema`` and
        ``grammar`` return at once. Raises what they raise for the same arguments.
        """
        text = {"json_schema": _schema_text, "grammar": _lark_text}.get(name)
        if text is None:
            return None
        return self._compiler.compile(_vocabulary(setup), text(arguments))

    def _make_processor(self, text: str, setup: ProcessorSetup) -> TurnLogitsProcessor:
        compiled = self._compiler.compile(_vocabulary(setup), text)
        return _GrammarProcessor(compiled.result(HELPER_START_S + COMPILE_WALL_S), setup)

    def close(self) -> None:
        """Stop the compiling helper process."""
        self._compiler.close()


def _schema_text(arguments: dict[str, Any]) -> str:
    schema = msgspec.convert(arguments, _SchemaArguments).schema
    bounded = with_bounded_space(schema) if isinstance(schema, dict) else schema
    return library().grammar_from_json_schema(json.dumps(bounded))


def _lark_text(arguments: dict[str, Any]) -> str:
    return library().grammar_from_lark(msgspec.convert(arguments, _LarkArguments).lark)


def _vocabulary(setup: ProcessorSetup) -> Vocabulary:
    if not setup.stop_token_ids:
        raise ValueError(
            "a turn with a grammar ends by a stop token when the grammar is complete, and this "
            "one has none; set stop_token_ids"
        )
    return Vocabulary(setup.tokenizer.get(), setup.vocab_size, setup.stop_token_ids[0])


class _GrammarProcessor:
    """Grammar state of one turn."""

    def __init__(self, compiled: "LLMatcher", setup: ProcessorSetup) -> None:
        self._matcher = compiled.deep_copy()
        self._stop_ids = torch.tensor(setup.stop_token_ids)
        self._eos_ids = torch.tensor(tokens_of(_vocabulary(setup)).eos_tokens)
        self._consumed_tokens = 0
        """Number of output tokens that the matcher has consumed."""

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        matcher = self._matcher
        matcher.consume_tokens(turn.output[self._consumed_tokens :].tolist())
        self._consumed_tokens = len(turn.output)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        allowed = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little"))
        allowed[self._eos_ids] = 0  # the tokenizer's EOS tokens need not be the turn's stop tokens
        allowed[self._stop_ids] = int(matcher.is_accepting())
        logits.masked_fill_(allowed == 0, -torch.inf)
