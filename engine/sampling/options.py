"""Per-turn sampling options beyond temperature, top-k and top-p, and the token counts for
penalties.

Options are read when a turn is submitted, and applied in each step. Most turns use none of these
options, and have no :class:`RowOptions`. All validation happens here, before the turn is queued, so
no submission can make a step fail.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.sampling.logits import (
    ProcessorSetup,
    TokenMask,
    TurnLogitsProcessor,
    TurnTokens,
)
from tidegate.engine.sampling.processors import ProcessorRegistry
from tidegate.engine.sampling.seen_tokens import SeenCounts
from tidegate.engine.sampling.stop_strings import StopStrings
from tidegate.errors import TurnRefused
from tidegate.kernels.native import RowEdits
from tidegate.transport.attachments import HIDDEN_STATES_BYTES_MAX
from tidegate.transport.limits import cut
from tidegate.transport.messages import SubmitTurn
from tidegate.transport.sampling import SamplingParams

REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
"""Range of the repetition penalty. Outside it only one token remains likely; within it no
logit overflows."""

PENALTY_MAX = 2.0
"""Largest absolute presence or frequency penalty: the range of vLLM and OpenAI."""

BIAS_MAX = 1e6
"""Largest absolute logit bias: the sum stays finite, and no other logit matters."""

TOP_LOGPROBS_BYTES_MAX = 2 * 1024 * 1024
"""Bytes of top log-probs in one step, over all turns: half of what its frame may have."""

STOP_STRINGS_MAX = 64
STOP_STRING_CHARS_MAX = 1000
PROCESSORS_MAX = 16
"""Limit of logits processors per turn; each is called for every token."""


class RowOptions:
    """One turn's sampling options, and the state that they keep of its tokens."""

    __slots__ = (
        "_masks",
        "_prompt_tokens",
        "_row_edits",
        "_stop_strings",
        "_tokens",
        "allowed",
        "banned",
        "bias_ids",
        "biases",
        "logits_processors",
        "min_tokens",
        "params",
        "seen",
        "step_tokens_max",
    )

    def __init__(
        self, params: SamplingParams, tokens: npt.NDArray[np.int32], prompt_tokens: int
    ) -> None:
        """``tokens`` is the turn's token buffer, prompt first; it is read, never written to."""
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._stop_strings: StopStrings | None = None
        self.params = params
        self.min_tokens = params.min_tokens
        self.banned = np.empty(0, np.int64)
        """Tokens excluded from the first ``min_tokens``."""
        self.bias_ids = np.array([bias.token_id for bias in params.logit_bias], np.int64)
        self.biases = np.array([bias.bias for bias in params.logit_bias], np.float32)
        self.step_tokens_max: int | None = None
        """Limit of tokens per step so that their top log-probs fit the step's frame; None
        without a limit."""
        self.seen: SeenCounts | None = None
        """Tokens to penalise; None without penalties."""
        self.logits_processors: list[tuple[str, TurnLogitsProcessor]] = []
        self._masks: list[tuple[str, TokenMask]] = []
        self._row_edits: RowEdits | None = None
        self.allowed: npt.NDArray[np.uint32] | None = None
        """What :attr:`TokenMask.allowed` of all processors have in common, always in the same
        array; None if there are others, which edit the logits."""

    def add_processors(self, processors: list[tuple[str, TurnLogitsProcessor]]) -> None:
        """Have the logits edited by these processors, one after another."""
        self.logits_processors = processors
        masks = [(name, each) for name, each in processors if isinstance(each, TokenMask)]
        if masks and len(masks) == len(processors):
            self._masks = masks
            first = masks[0][1].allowed
            self.allowed = first if len(masks) == 1 else first.copy()

    @property
    def edit_by_output(self) -> bool:
        """Whether the logits depend on the output's tokens, not only on their number."""
        return self.seen is not None or bool(self.logits_processors)

    @property
    def is_processed(self) -> bool:
        """Whether processors edit the logits in torch, after all other edits."""
        return bool(self.logits_processors) and self.allowed is None

    def row_edits(self) -> RowEdits | None:
        """Return the edits that compiled code makes, the same object for all tokens; None if there
        are none, or they are torch's."""
        has_edits = len(self.bias_ids) or self.min_tokens or self.edit_by_output
        if self._row_edits is None and has_edits and not self.is_processed:
            self._row_edits = RowEdits(
                biased_ids=self.bias_ids.ctypes.data,
                biases=self.biases.ctypes.data,
                biased=len(self.bias_ids),
                banned_ids=self.banned.ctypes.data,
                banned=len(self.banned),
                allowed=None if self.allowed is None else self.allowed.ctypes.data,
            )
            if self.seen is not None:
                self.seen.write_to(self._row_edits)
        return self._row_edits

    @property
    def counts_tokens(self) -> bool:
        """Whether output tokens must be given to :meth:`append`."""
        return self.seen is not None or self._stop_strings is not None

    def append(self, token_id: int, index: int) -> bool:
        """Count an output token; return whether it completes a stop string."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self._stop_strings is None:
            return False
        return self._stop_strings.completes(token_id) and index >= self.min_tokens

    def process(self, logits: torch.Tensor, index: int) -> str | None:
        """Run the processors on ``logits`` [V]; return the error that prevents sampling, if any.

        ``index`` is the output index of the token to be sampled.
        """
        first = self._prompt_tokens
        turn = TurnTokens(self._tokens[:first], self._tokens[first : first + index])
        for name, processor in self.logits_processors:
            try:
                processor(logits, turn)
            except BaseException as error:  # noqa: BLE001 - it may even exit, or a library panic
                return _failed(name, index, error)
        peak = float(logits.max())
        return None if math.isfinite(peak) else self.nothing_left(index, peak)

    def update_edits(self, index: int) -> str | None:
        """Bring the row's edits up to date with the output before the token of this index; return
        the error that prevents sampling, if any."""
        if self.seen is not None and self._row_edits is not None:
            self._row_edits.seen = len(self.seen.token_ids)
        if self.allowed is None:
            return None
        output = self._tokens[self._prompt_tokens : self._prompt_tokens + index]
        for name, mask in self._masks:
            try:
                mask.update(output)
            except BaseException as error:  # noqa: BLE001 - a library's panic is no Exception
                return _failed(name, index, error)
        if len(self._masks) > 1:
            np.bitwise_and.reduce([mask.allowed for _, mask in self._masks], out=self.allowed)
        return None

    def nothing_left(self, index: int, peak: float = -math.inf) -> str:
        """Return the error of processors that leave no token to be sampled.

        ``peak`` is the largest logit."""
        names = ", ".join(name for name, _ in self.logits_processors)
        return (
            f"after {index} tokens the logits processors {names} leave nothing to sample: the "
            f"largest logit is {peak}; keep at least one token's logit finite"
        )


def _failed(name: str, index: int, error: BaseException) -> str:
    reason = f"{type(error).__name__}: {error}"
    return cut(f"logits processor {name!r} failed after {index} tokens: {reason}")


class OptionReader:
    """Reads turns' options from submissions, and refuses those that this engine cannot serve."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_running_turns: int,
        tokenizer: ModelTokenizer | None = None,
        registry: ProcessorRegistry | None = None,
        refused_options: Mapping[str, str] | None = None,
        hidden_size: int = 0,
    ) -> None:
        """``refused_options``: options that the model cannot serve, each with the reason.
        ``hidden_size``: values of a hidden state; 0 if turns can't have them reported."""
        self._vocab_size = vocab_size
        self._step_top_logprobs = max(1, TOP_LOGPROBS_BYTES_MAX // (8 * max_running_turns))
        """One turn's share of the top log-probs of a step, in entries."""
        self._top_logprobs_max = min(vocab_size, self._step_top_logprobs)
        self._tokenizer = tokenizer or ModelTokenizer(None)
        self._registry = registry or ProcessorRegistry()
        self._refused_options = refused_options or {}
        self._hidden_size = hidden_size

    def prepare(self, message: SubmitTurn) -> list[Future[Any]]:
        """Start the grammar compilations that ``read`` would block on, in other threads; mostly
        none.

        Once all returned futures are done, and while the caller holds them, ``read`` returns at
        once.
        """
        params = message.sampling
        if not params.logits_processors or len(params.logits_processors) > PROCESSORS_MAX:
            return []
        futures = [
            self._registry.prepare(text, self._setup(params)) for text in params.logits_processors
        ]
        return [future for future in futures if future is not None and not future.done()]

    def close(self) -> None:
        """Stop the grammar helper process, if there is one."""
        self._registry.close()

    def _setup(self, params: SamplingParams) -> ProcessorSetup:
        stop_ids = sorted({t for t in params.stop_token_ids if 0 <= t < self._vocab_size})
        return ProcessorSetup(self._vocab_size, tuple(stop_ids), self._tokenizer)

    def read(self, message: SubmitTurn, tokens: npt.NDArray[np.int32]) -> RowOptions | None:
        """Return the options of a turn whose known tokens start ``tokens``; None if it has none.

        Raises:
            TurnRefused: it can never be served as asked.
        """
        params = message.sampling
        for option, reason in self._refused_options.items():
            if getattr(params, option):
                raise TurnRefused(reason)
        if _is_plain(params):
            return None
        known_tokens = len(message.token_ids) // 4
        prompt_tokens = known_tokens - message.sampled_before
        self._check(params, message.sampled_before)
        setup = self._setup(params)
        options = RowOptions(params, tokens, prompt_tokens)
        if params.top_logprobs:
            options.step_tokens_max = self._step_top_logprobs // params.top_logprobs
        if params.min_tokens:
            self._ban(options, setup.stop_token_ids)
        if _is_penalized(params):
            options.seen = SeenCounts(params, tokens, prompt_tokens, known_tokens, self._vocab_size)
        options.add_processors(
            [self._registry.make(text, setup) for text in params.logits_processors]
        )
        if params.stop_strings:
            strings = StopStrings(
                self._tokenizer.get(), params.stop_strings, tokens[:prompt_tokens].tolist()
            )
            strings.add_output(tokens[prompt_tokens:known_tokens].tolist())
            options._stop_strings = strings
        return options

    def _ban(self, options: RowOptions, stop_ids: Sequence[int]) -> None:
        if len(stop_ids) == self._vocab_size:
            raise TurnRefused(
                f"min_tokens={options.min_tokens} excludes stop tokens, and every token of the "
                "vocabulary is one; lower min_tokens, or name fewer stop tokens"
            )
        options.banned = np.array(stop_ids, np.int64)

    def _check(self, params: SamplingParams, sampled_before: int) -> None:
        _check_numbers(params)
        if not 0 <= params.top_logprobs <= self._top_logprobs_max:
            raise TurnRefused(
                f"top_logprobs must be in [0, {self._top_logprobs_max}] on this engine, got "
                f"{params.top_logprobs}"
            )
        tokens_max = sampled_before + params.max_tokens
        if not 0 <= params.min_tokens <= tokens_max:
            raise TurnRefused(
                f"min_tokens must be in [0, {tokens_max}], the turn's limit of output tokens, got "
                f"{params.min_tokens}"
            )
        if params.hidden_states:
            self._check_hidden_states(tokens_max)
        self._check_biases(params)
        _check_lists(params)

    def _check_hidden_states(self, tokens_max: int) -> None:
        if not self._hidden_size:
            raise TurnRefused("this engine's model has no hidden states to report; leave them out")
        nbytes = 4 * tokens_max * self._hidden_size
        if nbytes > HIDDEN_STATES_BYTES_MAX:
            tokens = HIDDEN_STATES_BYTES_MAX // (4 * self._hidden_size)
            raise TurnRefused(
                f"hidden states of {tokens_max} tokens are up to {nbytes} bytes, and a turn may "
                f"have {HIDDEN_STATES_BYTES_MAX}; set max_tokens to at most {tokens}"
            )

    def _check_biases(self, params: SamplingParams) -> None:
        token_ids = {bias.token_id for bias in params.logit_bias}
        if len(token_ids) < len(params.logit_bias):
            raise TurnRefused(
                "logit_bias names a token twice; name it once, with the sum of its biases"
            )
        for bias in params.logit_bias:
            if not 0 <= bias.token_id < self._vocab_size:
                raise TurnRefused(
                    f"logit_bias is for token {bias.token_id}, outside the vocabulary [0, "
                    f"{self._vocab_size}); use this model's tokenizer"
                )
            if not -BIAS_MAX <= bias.bias <= BIAS_MAX:
                raise TurnRefused(
                    f"logit_bias of token {bias.token_id} must be in [{-BIAS_MAX:g}, "
                    f"{BIAS_MAX:g}], got {bias.bias}; exclude tokens with the processor "
                    "disallowed_tokens"
                )


def _is_plain(params: SamplingParams) -> bool:
    return not (
        params.min_p
        or params.logit_bias
        or params.min_tokens
        or params.stop_strings
        or params.requests_tokens
        or params.logits_processors
        or _is_penalized(params)
    )


def _is_penalized(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )


def _check_numbers(params: SamplingParams) -> None:
    if not 0 <= params.min_p <= 1:
        raise TurnRefused(f"min_p must be in [0, 1] (0 keeps all tokens), got {params.min_p}")
    if not REPETITION_PENALTY_MIN <= params.repetition_penalty <= REPETITION_PENALTY_MAX:
        raise TurnRefused(
            f"repetition_penalty must be in [{REPETITION_PENALTY_MIN:g}, "
            f"{REPETITION_PENALTY_MAX:g}] (1 changes nothing), got {params.repetition_penalty}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -PENALTY_MAX <= value <= PENALTY_MAX:
            raise TurnRefused(
                f"{name} must be in [{-PENALTY_MAX:g}, {PENALTY_MAX:g}] (0 changes nothing), got "
                f"{value}"
            )


def _check_lists(params: SamplingParams) -> None:
    if len(params.logits_processors) > PROCESSORS_MAX:
        raise TurnRefused(
            f"a turn must have at most {PROCESSORS_MAX} logits_processors, got "
            f"{len(params.logits_processors)}"
        )
    if len(params.stop_strings) > STOP_STRINGS_MAX:
        raise TurnRefused(
            f"a turn must have at most {STOP_STRINGS_MAX} stop_strings, got "
            f"{len(params.stop_strings)}"
        )
    for text in params.stop_strings:
        if not 1 <= len(text) <= STOP_STRING_CHARS_MAX:
            raise TurnRefused(
                f"a stop string must have 1 to {STOP_STRING_CHARS_MAX} characters, got {len(text)}"
            )
