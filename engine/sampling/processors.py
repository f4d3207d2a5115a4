"""Registry of logits processors by name: the built-in ones and those of users' modules.

A module adds processors as ``PROCESSORS = {"my_name": make_mine}``. An engine imports only the
modules on its command line, never names that come over the wire.
"""

import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.sampling.grammar import Grammars
from tidegate.engine.sampling.logits import (
    MakeProcessor,
    ProcessorSetup,
    TokenMask,
    TurnLogitsProcessor,
    TurnTokens,
    are_among,
)
from tidegate.errors import ConfigError, TurnRefused
from tidegate.transport.limits import cut
from tidegate.transport.sampling import LogitsProcessor

BAD_SEQUENCES_MAX = 128
"""Token sequences of one turn's ``bad_words``, as in vLLM: each is compared for every token."""

BAD_WORD_CHARACTERS_MAX = 1000
"""Characters of one of ``bad_words``, as of a stop string: words are tokenised in the engine."""


class ProcessorRegistry:
    """All processors that an engine offers, by name."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """Register the built-in processors and those of ``modules``, which are imported.

        Raises:
            ConfigError: a module cannot be imported, has no ``PROCESSORS``, or reuses a name.
        """
        self._grammars = Grammars()
        self._makers: dict[str, MakeProcessor] = {
            **BUILT_IN,
            "json_schema": self._grammars.json_schema,
            "grammar": self._grammars.grammar,
        }
        for module in modules:
            for name, make in _makers_of(module).items():
                if name in self._makers:
                    raise ConfigError(
                        f"module {module} has a processor {name!r}, a name already used by another "
                        f"module or by Tidegate; rename it"
                    )
                self._makers[name] = make

    def prepare(self, text: str, setup: ProcessorSetup) -> Future[Any] | None:
        """Start the grammar compilation that ``make`` would block on; None if there is none.

        Once the future is done, and while the caller holds it, ``make`` returns at once. Errors in
        ``text`` are left to ``make``.
        """
        try:
            processor_spec = LogitsProcessor.from_str(text)
            return self._grammars.prepare(processor_spec.name, processor_spec.arguments, setup)
        except BaseException:  # noqa: BLE001 - as in ``make``, which is called next
            return None

    def close(self) -> None:
        """Stop the grammar helper process, if there is one."""
        self._grammars.close()

    def make(self, text: str, setup: ProcessorSetup) -> tuple[str, TurnLogitsProcessor]:
        """Make the processor that ``text`` names; return its name and the processor.

        Raises:
            TurnRefused: there is no such processor, or it rejects its arguments.
        """
        try:
            processor_spec = LogitsProcessor.from_str(text)
        except ConfigError as error:
            raise TurnRefused(str(error)) from None
        make = self._makers.get(processor_spec.name)
        if make is None:
            raise TurnRefused(
                f"unknown logits processor {processor_spec.name!r}; this engine has "
                f"{', '.join(sorted(self._makers))}; start engines with logits_processors=[module] "
                "to add your own"
            )
        try:
            return processor_spec.name, make(processor_spec.arguments, setup)
        except TurnRefused:
            raise
        except BaseException as error:  # noqa: BLE001 - it may even exit, or a library panic
            reason = f"{type(error).__name__}: {error}"
            raise TurnRefused(
                cut(
                    f"logits processor {processor_spec.name!r} refuses "
                    f"{processor_spec.arguments!r:.300}: {reason}"
                )
            ) from None


def _makers_of(module: str) -> Mapping[str, MakeProcessor]:
    try:
        makers = importlib.import_module(module).PROCESSORS
    except Exception as error:
        raise ConfigError(
            f"can't load processors from module {module!r}: {type(error).__name__}: {error}; "
            f"the module must be importable where engines start, and have a dict PROCESSORS"
        ) from error
    if not isinstance(makers, Mapping) or not all(map(callable, makers.values())):
        raise ConfigError(f"{module}.PROCESSORS must map names to functions, got {makers!r:.200}")
    return makers


class _TokenIds(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[int]


def _are_named(arguments: dict[str, Any], setup: ProcessorSetup) -> npt.NDArray[np.bool_]:
    """Return which tokens of the vocabulary are named, [V]."""
    token_ids = msgspec.convert(arguments, _TokenIds).token_ids
    outside = [t for t in token_ids if not 0 <= t < setup.vocab_size]
    if outside:
        raise ValueError(
            f"a logits processor's argument names token {outside[0]}, and the model's vocabulary "
            f"is [0, {setup.vocab_size}); use this model's tokenizer"
        )
    return are_among(token_ids, setup.vocab_size)


def allowed_tokens(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Allow only ``token_ids``: an action mask. Stop tokens must be listed, too."""
    are_allowed = _are_named(arguments, setup)
    if not are_allowed.any():
        raise ValueError("token_ids is empty, so no token is allowed; name at least one")
    return TokenMask(are_allowed)


def disallowed_tokens(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Exclude ``token_ids``."""
    are_excluded = _are_named(arguments, setup)
    if are_excluded.all():
        raise ValueError(
            f"token_ids holds all {setup.vocab_size} tokens of the vocabulary, so none is left to "
            "sample; omit at least one"
        )
    return TokenMask(~are_excluded)


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    words: list[str]


def bad_words(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Keep the output from containing any of ``words``, as vLLM's ``bad_words`` does.

    A word is a sequence of tokens, as the tokenizer writes it at the beginning of a text, and after
    a space if that only exchanges its first token. The last token of a sequence is excluded where
    the output ends with the others.
    """
    words = msgspec.convert(arguments, _Words).words
    if not 1 <= len(words) <= BAD_SEQUENCES_MAX:  # before they are tokenised
        raise ValueError(f"bad_words takes 1 to {BAD_SEQUENCES_MAX} words, got {len(words)}")
    if (length := max(map(len, words))) > BAD_WORD_CHARACTERS_MAX:
        raise ValueError(
            f"a word must have at most {BAD_WORD_CHARACTERS_MAX} characters, got {length}"
        )
    sequences = [sequence for word in words for sequence in _sequences_of(word, setup)]
    if len(sequences) > BAD_SEQUENCES_MAX:
        raise ValueError(
            f"words must be at most {BAD_SEQUENCES_MAX} sequences of tokens, got {len(sequences)}"
        )
    return _BadWords(sequences, setup.vocab_size)


class _BadWords(TokenMask):
    """Excludes the last token of each sequence where the output ends with the others."""

    def __init__(self, sequences: list[list[int]], vocab_size: int) -> None:
        known = [each for each in sequences if max(each) < vocab_size]  # no other can be sampled
        super().__init__(~are_among([one for one, *rest in known if not rest], vocab_size))
        self._always_allowed = self.allowed.copy()
        self._by_second_last: dict[int, list[list[int]]] = {}
        for each in known:
            if len(each) > 1:
                self._by_second_last.setdefault(each[-2], []).append(each)

    def update(self, output: npt.NDArray[np.int32]) -> None:
        self.allowed[:] = self._always_allowed
        for *before, last in self._by_second_last.get(int(output[-1]), ()) if len(output) else ():
            if output[-len(before) :].tolist() == before:
                self.allowed[last // 32] &= ~np.uint32(1 << last % 32)


def _sequences_of(word: str, setup: ProcessorSetup) -> list[list[int]]:
    tokenizer, text = setup.tokenizer.get(), word.lstrip()
    plain, spaced = (
        tokenizer.encode(prefix + text, add_special_tokens=False).ids for prefix in ("", " ")
    )
    if not text or not plain:
        raise ValueError(f"a word must have at least one token, got {word!r:.100}")
    is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
    return [plain, spaced] if is_other else [plain]


class TemperatureSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Temperature that changes linearly from ``initial`` to ``final``, then stays.

    For the output token with index i it is ``initial + (final - initial) * min(1, i /
    warmup_tokens)``. It multiplies the temperature of ``SamplingParams``, which is best left at 1.
    """

    initial: float
    final: float
    warmup_tokens: int

    def __post_init__(self) -> None:
        for value in (self.initial, self.final):
            if not 1e-3 <= value <= 1e3:
                raise ValueError(f"temperatures must be in [0.001, 1000], got {value}")
        if self.warmup_tokens < 1:
            raise ValueError(f"warmup_tokens must be at least 1, got {self.warmup_tokens}")

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        """Divide the logits by the current temperature; the largest is shifted to 0 first,
        against overflow."""
        progress = min(1.0, len(turn.output) / self.warmup_tokens)
        temperature = self.initial + (self.final - self.initial) * progress
        logits.sub_(logits.max()).div_(temperature)


def temperature_schedule(arguments: dict[str, Any], setup: ProcessorSetup) -> TurnLogitsProcessor:
    """Make a :class:`TemperatureSchedule`."""
    return msgspec.convert(arguments, TemperatureSchedule)


BUILT_IN: dict[str, MakeProcessor] = {
    "allowed_tokens": allowed_tokens,
    "bad_words": bad_words,
    "disallowed_tokens": disallowed_tokens,
    "temperature_schedule": temperature_schedule,
}
