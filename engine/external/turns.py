"""State of one turn that an external engine samples: tokens, and their reported weight versions.

Also refuses turns whose options the engine does not implement. Provenance comes from the labels in
:class:`GeneratedChunk`.
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
from tidegate.engine.scheduling.sequences import EngineLimits, fitted, read_prompt
from tidegate.errors import TurnRefused
from tidegate.transport.attachments import ATTACHMENTS, Attachment
from tidegate.transport.messages import KvSpan, Prefill, SamplingParams, SubmitTurn

ALWAYS_SUPPORTED = {"max_tokens", "temperature", "seed", "min_tokens", "cache_salt"}
"""Options that are accepted for every engine. External engines ignore seeds, so their samples are
not reproducible (docs/vllm-engine.md). ``min_tokens`` is checked separately, because 0 is every
engine's default. The turn's cache salt is part of each request's salt."""

ATTACHMENT_OPTIONS = {kind.option for kind in ATTACHMENTS.values()}
"""Options that only report more about a token."""

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
    stream_interval_tokens: int = 1
    """Number of tokens that the engine may collect of the newest request before it sends them."""
    version: int = 0
    """Weight version that computes the newest request's KV from its start."""
    reported_labels: list[VersionLabel] = field(default_factory=list)
    """Weight labels under which the worker has reported the newest request's tokens."""
    preemptions: int | None = None
    """Engine's preemption count when this turn's KV was kept over new weights; None
    if it never was."""
    is_aborted: bool = False
    """Whether the newest request has been cancelled, so that its chunks are dropped."""
    has_ended: bool = False
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
    def has_output(self) -> bool:
        """Whether the newest request has returned a token."""
        return self.sampled > self.request_at

    @property
    def adapter(self) -> str:
        """The run's name of the turn's adapter; empty for none."""
        return self.message.sampling.adapter

    def request(
        self, version: int, salt: str, lora: str = "", stream_interval_tokens: int = 1
    ) -> GenerationRequest:
        """Make a request for the remaining tokens, to weights ``version`` and the adapter
        ``lora``."""
        self.request_at, self.version, self.lora = self.sampled, version, lora
        self.stream_interval_tokens = stream_interval_tokens
        self.reported_labels, self.preemptions, self.is_aborted = [], None, False
        options, sampled_before = self.message.sampling, self.message.sampled_before + self.sampled
        if lora:
            salt = f"{salt}+{lora}"
        if options.cache_salt:
            salt = f"{salt}/{options.cache_salt}"  # labels do not contain "/"
        sampling = msgspec.structs.replace(
            options,
            max_tokens=options.max_tokens - self.sampled,
            min_tokens=max(0, options.min_tokens - sampled_before),
        )
        return GenerationRequest(
            token_ids=self.tokens,
            sampling=sampling,
            sampled_before=sampled_before,
            salt=salt,
            lora=lora,
            media=self.message.media,
            stream_interval_tokens=stream_interval_tokens,
        )

    def attachments_of(self, chunk: GeneratedChunk) -> list[Attachment]:
        """Return a chunk's attachments as the wire's; call it before the chunk is added."""
        return [
            msgspec.structs.replace(
                each,
                turn=self.handle,
                start=each.start + (self.sampled if ATTACHMENTS[each.name].axis == "token" else 0),
            )
            for each in chunk.attachments
        ]

    def add_chunk(self, chunk: GeneratedChunk, label: str) -> Prefill | None:
        """Add a chunk's tokens; return the prefill record if they are the request's first."""
        if not chunk.token_ids:
            return None
        prefill = None
        if not self.has_output:
            spans = [KvSpan(self.version, 0, len(self.tokens))]
            prefill = Prefill(self.handle, self.sampled, spans)
        start = self.sampled - self.request_at
        self.tokens += chunk.token_ids
        end = self.sampled - self.request_at
        if self.reported_labels and self.reported_labels[-1].label == label:
            self.reported_labels[-1] = self.reported_labels[-1]._replace(end=end)
        else:
            self.reported_labels.append(VersionLabel(label, start, end))
        return prefill

    def check_labels(self, labels: Sequence[VersionLabel] | None) -> None:
        """Compare the engine's labels of the request's tokens with those that were reported.

        Raises:
            TurnRefused: they differ.
        """
        if labels is None or list(labels) == self.reported_labels:
            return
        raise TurnRefused(
            f"the engine labels the tokens of this turn {_describe(labels)}, but when they came "
            f"they were reported as {_describe(self.reported_labels)}; the weights that sampled "
            "them are unknown. Does another client load weights into this engine?"
        )


def read_turn(
    message: SubmitTurn, arrival: int, *, limits: EngineLimits, capabilities: Capabilities
) -> ExternalTurn:
    """Validate a submission and make its turn.

    Raises:
        TurnRefused: it can never be served as asked.
    """
    tokens = read_prompt(message, limits).tolist()
    message = fitted(message, limits)
    if unsupported := sorted({medium.kind for medium in message.media} - capabilities.media):
        raise TurnRefused(
            f"{capabilities.engine} reads no {', '.join(unsupported)} with this model; leave them "
            "out, or serve a model that does"
        )
    sampling = message.sampling
    options = {
        name
        for name in SamplingParams.__struct_fields__
        if name not in ALWAYS_SUPPORTED and getattr(sampling, name) != getattr(_DEFAULTS, name)
    }
    if "adapter" in options and not capabilities.lora_rank_max:
        raise TurnRefused(
            f"{capabilities.engine} takes no LoRA adapters: "
            f"{capabilities.lora_lacks or 'it has none'}"
        )
    options.discard("adapter")
    if sampling.min_tokens:
        options.add("min_tokens")
    if unsupported_options := sorted(options - capabilities.sampling):
        raise TurnRefused(
            f"{capabilities.engine} does not implement {', '.join(unsupported_options)} as "
            f"Tidegate does, only {', '.join(sorted(capabilities.sampling))}. Leave the rest out, "
            "or use Tidegate's own engine"
        )
    if sampling.top_logprobs > capabilities.top_logprobs_max:
        raise TurnRefused(
            f"{capabilities.engine} returns {capabilities.top_logprobs_max} top_logprobs at most, "
            f"and {sampling.top_logprobs} are requested; start it with a higher limit "
            "(--max-logprobs in vLLM)"
        )
    shaping = options - {"stop_token_ids", "min_tokens", *ATTACHMENT_OPTIONS}
    if not capabilities.has_processed_logprobs and (
        shaping or sampling.temperature not in (0.0, 1.0)
    ):
        raise TurnRefused(
            f"{capabilities.engine} reports log-probs before temperature and sampling options, "
            "which aren't those of what it samples from; start it with processed log-probs "
            "(--logprobs-mode processed_logprobs in vLLM), or sample at temperature 1 only"
        )
    return ExternalTurn(message, tokens, len(tokens), arrival)


def _describe(labels: Sequence[VersionLabel]) -> str:
    shown = [
        f"{label.label} in [{label.start}, {label.end})" for label in labels[:LABELS_SHOWN_MAX]
    ]
    return ", ".join(shown) + (", …" if len(labels) > LABELS_SHOWN_MAX else "") or "nothing"
