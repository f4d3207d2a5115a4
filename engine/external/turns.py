"""State of one turn that an external engine samples: tokens, and their reported weight versions.

Used by ``ExternalTurnQueue`` and ``Streams``. Also refuses turns whose options the engine does not
implement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tidegate.engine.external.adapter import (
    Capabilities,
    GeneratedChunk,
    GenerationRequest,
    VersionLabel,
)
from tidegate.engine.scheduling.sequences import EngineLimits, read_prompt
from tidegate.errors import TurnRefused
from tidegate.transport.messages import KvSpan, Prefill, SamplingParams, SubmitTurn

ALWAYS_DONE = {"max_tokens", "temperature", "seed", "min_tokens", "cache_salt"}
"""Options that are accepted for every engine. External engines ignore seeds, so their samples are
not reproducible (docs/engines.md). ``min_tokens`` is checked apart, because 0 is every engine's
default. The turn's cache salt is part of each request's salt."""

LABELS_SHOWN_MAX = 4

_DEFAULTS = SamplingParams(max_tokens=0)


@dataclass(slots=True, eq=False)
class ExternalTurn:
    """One submitted turn, served by one or more successive requests to the engine."""

    message: SubmitTurn
    tokens: list[int]
    """The submitted context, and all tokens sampled since."""
    submitted: int
    """Number of leading ``tokens`` that were submitted."""
    arrival: int
    request_at: int = 0
    """Output tokens of this submission when the newest request was made."""
    lora: str = ""
    """Engine's name of the newest request's adapter."""
    version: int = 0
    """Weight version that computes the newest request's KV from its start."""
    said: list[VersionLabel] = field(default_factory=list)
    """Weight labels under which the worker has reported the newest request's tokens."""
    preemptions: int | None = None
    """Engine's preemption count when this turn's KV was kept over new weights; None
    if it never was."""
    is_cut: bool = False
    """Whether the newest request has been cancelled, so that its chunks are dropped."""
    is_over: bool = False
    """Whether the turn has ended, not only its request."""

    @property
    def handle(self) -> int:
        """Handle of the turn on the wire."""
        return self.message.turn

    @property
    def rank(self) -> tuple[int, int]:
        """Priority, then arrival; lower runs first."""
        return self.message.priority, self.arrival

    @property
    def sampled(self) -> int:
        """Number of output tokens of this submission."""
        return len(self.tokens) - self.submitted

    @property
    def has_begun(self) -> bool:
        """Whether the newest request has returned a token."""
        return self.sampled > self.request_at

    @property
    def adapter(self) -> str:
        """The run's name of the turn's adapter; empty for none."""
        return self.message.sampling.adapter

    def request(self, version: int, salt: str, lora: str = "") -> GenerationRequest:
        """Make a request for the rest, by weights ``version`` and the adapter ``lora``."""
        self.request_at, self.version, self.lora = self.sampled, version, lora
        self.said, self.preemptions, self.is_cut = [], None, False
        asked, before = self.message.sampling, self.message.sampled_before + self.sampled
        if lora:
            salt = f"{salt}+{lora}"
        if asked.cache_salt:
            salt = f"{salt}/{asked.cache_salt}"  # labels do not contain "/"
        sampling = msgspec.structs.replace(
            asked,
            max_tokens=asked.max_tokens - self.sampled,
            min_tokens=max(0, asked.min_tokens - before),
        )
        return GenerationRequest(
            token_ids=self.tokens,
            sampling=sampling,
            sampled_before=before,
            salt=salt,
            lora=lora,
            media=self.message.media,
        )

    def take(self, chunk: GeneratedChunk, label: str) -> Prefill | None:
        """Add a chunk's tokens; return the prefill record if they are the request's first."""
        if not chunk.token_ids:
            return None
        prefill = None
        if not self.has_begun:
            spans = [KvSpan(self.version, 0, len(self.tokens))]
            prefill = Prefill(self.handle, self.sampled, spans)
        start = self.sampled - self.request_at
        self.tokens += chunk.token_ids
        end = self.sampled - self.request_at
        if self.said and self.said[-1].label == label:
            self.said[-1] = self.said[-1]._replace(end=end)
        else:
            self.said.append(VersionLabel(label, start, end))
        return prefill

    def check_labels(self, labels: Sequence[VersionLabel] | None) -> None:
        """Compare the engine's labels of the request's tokens with those that were reported.

        Raises:
            TurnRefused: they differ.
        """
        if labels is None or list(labels) == self.said:
            return
        raise TurnRefused(
            f"the engine labels the tokens of this turn {_say(labels)}, but when they came they "
            f"were taken for {_say(self.said)}; nobody knows which weights sampled them. Does "
            f"somebody else give this engine weights?"
        )


def read_turn(
    message: SubmitTurn, arrival: int, *, limits: EngineLimits, able: Capabilities
) -> ExternalTurn:
    """Validate a submission and make its turn.

    Raises:
        TurnRefused: it can never be served as asked.
    """
    tokens = read_prompt(message, limits).tolist()
    if unread := sorted({each.kind for each in message.media} - able.media):
        raise TurnRefused(f"{able.engine} reads no {', '.join(unread)} with this model")
    sampling = message.sampling
    asked = {
        name
        for name in SamplingParams.__struct_fields__
        if name not in ALWAYS_DONE and getattr(sampling, name) != getattr(_DEFAULTS, name)
    }
    if "adapter" in asked and not able.lora_rank_max:
        raise TurnRefused(
            f"{able.engine} takes no LoRA adapters: {able.lora_lacks or 'it has none'}"
        )
    asked.discard("adapter")
    if sampling.min_tokens:
        asked.add("min_tokens")
    if lacking := sorted(asked - able.sampling):
        raise TurnRefused(
            f"{able.engine} can't be asked for {', '.join(lacking)} as Tidegate means it; it can "
            f"for {', '.join(sorted(able.sampling))}. Leave it out, or use Tidegate's own engine"
        )
    if sampling.top_logprobs > able.top_logprobs_max:
        raise TurnRefused(
            f"{able.engine} tells {able.top_logprobs_max} top_logprobs at most, and "
            f"{sampling.top_logprobs} are asked for; start it with more (--max-logprobs in vLLM)"
        )
    shapes = asked - {"stop_token_ids", "min_tokens", "top_logprobs", "raw_logprobs"}
    if not able.has_processed_logprobs and (shapes or sampling.temperature not in (0.0, 1.0)):
        raise TurnRefused(
            f"{able.engine} tells log-probs as they are before temperature and sampling options, "
            f"which aren't those of what it samples from; start it with processed log-probs "
            f"(--logprobs-mode processed_logprobs in vLLM), or sample at temperature 1 only"
        )
    return ExternalTurn(message, tokens, len(tokens), arrival)


def _say(labels: Sequence[VersionLabel]) -> str:
    shown = [f"{one.label} in [{one.start}, {one.end})" for one in labels[:LABELS_SHOWN_MAX]]
    return ", ".join(shown) + (", …" if len(labels) > LABELS_SHOWN_MAX else "") or "nothing"
