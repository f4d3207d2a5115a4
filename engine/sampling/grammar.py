"""Structured output: logits processors for JSON schemas and Lark grammars.

The processors are called ``json_schema`` and ``grammar``. Schemas and grammars are those that
llguidance supports (https://github.com/guidance-ai/llguidance), an optional dependency. A turn may
sample one of its stop tokens exactly where the grammar is complete.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tidegate.engine.sampling.grammar_compiler import (
    COMPILE_WALL_S,
    HELPER_START_S,
    GrammarCompiler,
    Vocabulary,
    library,
    tokens_of,
)
from tidegate.engine.sampling.logits import (
    ProcessorSetup,
    TokenMask,
    TurnLogitsProcessor,
    are_among,
)
from tidegate.transport.sampling import with_bounded_space

if TYPE_CHECKING:
    from llguidance import LLMatcher


MASK_WALL_S = 0.25
"""Seconds for the mask of one token. Most take 0.1 ms; ambiguous grammars of 40 KB take a minute,
and llguidance's own limits do not cover that work."""

MASKS_WALL_S = 1.0
"""Seconds for all masks of a turn, beside ``MASK_MEAN_S`` for each of its tokens."""

MASK_MEAN_S = 0.005

INLINE_GRAMMAR_BYTES = 2048
"""Size of a grammar up to which its masks are computed on the engine's loop: within llguidance's
limits they take 70 ms at worst. Larger ones are computed in a thread, at 20 us per token."""

GIVEN_UP_MAX = 2
"""Computations that were given up and still run, beyond which the turns of large grammars are
refused."""


class _SchemaArguments(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool


class _LarkArguments(msgspec.Struct, forbid_unknown_fields=True):
    lark: str


class Grammars:
    """The processors ``json_schema`` and ``grammar`` of one engine, with a shared compiler."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler()
        self._masks = MaskThread()

    def json_schema(self, arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
        """Make a processor that constrains the output to JSON that fits ``schema``."""
        return self._make_processor(_schema_text, arguments, setup)

    def grammar(self, arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
        """Make a processor that constrains the output to the Lark grammar ``lark``."""
        return self._make_processor(_lark_text, arguments, setup)

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
        vocabulary = _vocabulary(setup)
        return self._compiler.compile(vocabulary, text(arguments, vocabulary.tokenizer))

    def _make_processor(
        self,
        text: Callable[[dict[str, Any], Tokenizer], str],
        arguments: dict[str, Any],
        setup: ProcessorSetup,
    ) -> TurnLogitsProcessor:
        vocabulary = _vocabulary(setup)
        grammar = text(arguments, vocabulary.tokenizer)
        compiled = self._compiler.compile(vocabulary, grammar)
        matcher = compiled.result(HELPER_START_S + COMPILE_WALL_S)
        is_small = len(grammar) <= INLINE_GRAMMAR_BYTES
        return _GrammarProcessor(matcher, setup, None if is_small else self._masks)

    def close(self) -> None:
        """Stop the compiling helper process, and the thread of masks."""
        self._compiler.close()
        self._masks.close()


def _schema_text(arguments: dict[str, Any], _tokenizer: Tokenizer) -> str:
    schema = msgspec.convert(arguments, _SchemaArguments).schema
    bounded = with_bounded_space(schema) if isinstance(schema, dict) else schema
    return library().grammar_from_json_schema(json.dumps(bounded))


def _lark_text(arguments: dict[str, Any], tokenizer: Tokenizer) -> str:
    lark = msgspec.convert(arguments, _LarkArguments).lark
    return library().grammar_from_lark(_with_token_ids(lark, tokenizer))


_LARK_PART = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?P<token><[^<>\[\]\s"]+>)'
)
"""String, comment, regular expression, or token in angle brackets of a Lark grammar."""


def _with_token_ids(lark: str, tokenizer: Tokenizer) -> str:
    """Return a Lark grammar that names added tokens by id where they are not special, such as
    Qwen's ``<think>``: llguidance knows only special tokens by their names."""
    text_tokens = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if not token.special
    }

    def named(part: re.Match[str]) -> str:
        token_id = text_tokens.get(part["token"] or "")
        return part[0] if token_id is None else f"<[{token_id}]>"

    return _LARK_PART.sub(named, lark) if text_tokens else lark


def _vocabulary(setup: ProcessorSetup) -> Vocabulary:
    if not setup.stop_token_ids:
        raise ValueError(
            "a turn with a grammar ends by a stop token when the grammar is complete, and this "
            "one has none; set stop_token_ids"
        )
    return Vocabulary(setup.tokenizer.get(), setup.vocab_size, setup.stop_token_ids[0])


class MaskThread:
    """Computes masks, one at a time, in a thread that is given up if one takes too long: nothing
    can end it, but it runs without the GIL, and llguidance's limits end it within a minute."""

    def __init__(self) -> None:
        """Start nothing: the thread starts with the first mask."""
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        """Computation that the thread does next; None ends the thread."""
        self._results: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()
        self._given_up: list[threading.Thread] = []

    def compute(self, work: Callable[[], bool]) -> bool:
        """Return what ``work`` returns.

        Raises:
            ValueError: it takes longer than ``MASK_WALL_S``, or too many others have.
        """
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= GIVEN_UP_MAX:
            raise ValueError(
                f"{GIVEN_UP_MAX} grammars that took too long are still worked on; try again in a "
                f"minute, or with a grammar of at most {INLINE_GRAMMAR_BYTES} bytes"
            )
        if self._thread is None:
            self._work, self._results = queue.SimpleQueue(), queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_work_off, args=(self._work, self._results), name="masks", daemon=True
            )
            self._thread.start()
        self._work.put(work)
        try:
            result = self._results.get(timeout=MASK_WALL_S)
        except queue.Empty:
            self._given_up.append(self._thread)
            self.close()
            raise ValueError(
                f"the allowed tokens were not found within {MASK_WALL_S:g} s: the grammar is too "
                f"ambiguous; constrain less of the output"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Have the thread end once its computation has."""
        self._work.put(None)
        self._thread = None


def _work_off(
    tasks: "queue.SimpleQueue[Callable[[], bool] | None]",
    results: "queue.SimpleQueue[bool | BaseException]",
) -> None:
    while (task := tasks.get()) is not None:
        try:
            results.put(task())
        except BaseException as error:  # noqa: BLE001 - a library's panic is no Exception
            results.put(error)


class _GrammarProcessor(TokenMask):
    """Grammar state of one turn."""

    def __init__(
        self, compiled: "LLMatcher", setup: ProcessorSetup, thread: MaskThread | None
    ) -> None:
        """``thread`` computes the masks; None: the caller's own."""
        # The tokenizer's EOS tokens need not be the turn's stop tokens, which end the grammar.
        vocab, stop_ids = setup.vocab_size, setup.stop_token_ids
        eos_ids = tokens_of(_vocabulary(setup)).eos_tokens
        super().__init__(~are_among([*eos_ids, *stop_ids], vocab))
        self._never_ends = self.allowed.copy()
        self._stops = TokenMask(are_among(stop_ids, vocab)).allowed
        self._address = self.allowed.ctypes.data
        self._matcher = compiled.deep_copy()
        self._thread = thread
        self._consumed_tokens = 0
        """Number of output tokens that the matcher has consumed."""
        self._spent_s = 0.0
        """Seconds that all masks have taken."""

    def update(self, output: npt.NDArray[np.int32]) -> None:
        began_s = time.monotonic()
        new_tokens = output[self._consumed_tokens :].tolist()
        self._consumed_tokens = len(output)
        if self._thread is None:
            may_end = self._advance(new_tokens)
        else:
            may_end = self._thread.compute(lambda: self._advance(new_tokens))
        self._spent_s += time.monotonic() - began_s
        if self._spent_s > MASKS_WALL_S + MASK_MEAN_S * self._consumed_tokens:
            raise ValueError(
                f"finding the allowed tokens took {self._spent_s:.1f} s for "
                f"{self._consumed_tokens} tokens; constrain less of the output"
            )
        self.allowed &= self._never_ends
        if may_end:
            self.allowed |= self._stops

    def _advance(self, new_tokens: list[int]) -> bool:
        """Find what the grammar allows after ``new_tokens``; return whether it is complete."""
        matcher = self._matcher
        matcher.consume_tokens(new_tokens)
        matcher.unsafe_compute_mask_ptr(self._address, self.allowed.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher.is_accepting()
