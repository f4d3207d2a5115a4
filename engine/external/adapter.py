"""What must another engine be able to do, to serve turns of a run? The interface of its adapter.

It knows nothing of the wire, of handles or of steps: all that is the worker's, once for every kind
of engine (docs/engines.md). An adapter translates, and says what its engine can't do.

An adapter lives on one asyncio loop. Its control calls (all but ``generate``, ``score``, ``check``
and ``preemptions``) are made one at a time.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SamplingParams
from tidegate.transport.scoring import Want
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

Ended = Literal["stop", "length", "abort"]
"""Why a request has ended: it sampled a stop token; ``max_tokens``; its engine gave it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one running engine is, and can do. What is left at its default it can't."""

    engine: str
    """Its kind and version, for people: ``vllm 0.32.0``."""
    context_tokens_max: int
    running_turns_max: int
    """Requests at once; more are kept waiting by the worker, which knows their priorities."""
    has_processed_logprobs: bool = False
    """Whether log-probs are those of the distribution sampled from: after temperature, top-k, …
    Without, only turns are served whose options leave raw ones as they are."""
    freezes: bool = False
    """Whether ``pause("keep")`` leaves requests where they are, KV and all. Without, the worker
    aborts them, and asks for the rest once it goes on: the same, but the KV is computed again."""
    keeps_kv: bool = False
    """Whether frozen requests may go on with their old KV under new weights, *and* the engine then
    says where versions change (``Chunk.labels``). Needs ``freezes``. It is what
    ``kv_policy="keep"`` asks for."""
    sampling: frozenset[str] = frozenset()
    """Fields of ``SamplingParams`` that it does exactly as described there, beyond ``max_tokens``
    and ``temperature``. A turn that asks for another is refused, by name."""
    top_logprobs_max: int = 0
    """So many of the likeliest tokens can be told with each; ``top_logprobs`` counts as a field."""
    scores: frozenset[Want] = frozenset()
    dtype: str = ""
    """What its model computes in: ``float32``, ``bfloat16``, ``float16``; empty: it doesn't say."""
    num_blocks: int = 0
    """Of its KV cache, for the statistics; 0: it doesn't say."""
    block_tokens: int = 0
    media: frozenset[MediaKind] = frozenset()
    """What its model reads beside tokens."""
    takes_tensors: bool = False
    """Whether new weights come by ``load_tensors``, so that none are written to a disk."""
    sleep_levels: frozenset[SleepLevel] = frozenset()
    """At which its memory can be given back; see :mod:`tidegate.transport.sleep_messages`."""
    lora_rank_max: int = 0
    """Of LoRA adapters, which it loads from files beside its weights; 0: it takes none."""
    lora_fills_matrices: bool = False
    """Whether an adapter of a query, key or value projection must have all three, and one of a gate
    or up projection both: it has one matrix for them."""
    lora_lacks: str = ""
    """Why it takes none, or how to start it so that it does."""
    lora_spoils_others: str = ""
    """Why turns without an adapter can't be served beside those that have one; empty: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Generate from these tokens."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    """``max_tokens`` are left to sample, ``min_tokens`` too."""
    sampled_before: int = 0
    """So many of ``token_ids``, at the end, are the turn's own output."""
    salt: str
    """KV computed under another salt must not be used: it may be of other weights."""
    lora: str = ""
    """The adapter to compute with, as :meth:`EngineAdapter.load_lora` was told to call it."""
    media: Sequence[Media] = ()
    """In the order in which their placeholders stand in ``token_ids``."""


LORA_NAMES = "tidegate-lora-"
"""How the names of adapters begin that engines are given, so that those left behind are known."""


class VersionLabel(NamedTuple):
    """What the engine itself says of output tokens ``[start, end)`` of a request."""

    label: str
    """As :meth:`EngineAdapter.load_weights` was told to call the weights."""
    start: int
    end: int


class TopLogprobs(NamedTuple):
    """The likeliest tokens beside each token of a chunk: C tokens, k each."""

    token_ids: list[int]
    """[C * k], likeliest first."""
    logprobs: list[float]


class Chunk(NamedTuple):
    """Some more tokens of a request, as soon as the engine tells of them; maybe none."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log, one each."""
    ended: Ended | None = None
    """In the last chunk, and in no other. One with ``stop`` contains the stop token."""
    labels: Sequence[VersionLabel] | None = None
    """In the last chunk, of all the request's tokens, if the engine says."""
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model makes of given tokens; only what was asked for is there."""

    logprobs: Sequence[float] = ()
    """[P]"""
    top: TopLogprobs | None = None
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Say something of these tokens. Of what is cached under any salt nothing may be used."""

    token_ids: Sequence[int]
    want: Want
    start: int
    top_logprobs: int
    temperature: float


class EngineAdapter(Protocol):
    """One engine, through its own API.

    Any method may raise ``EngineGone``: nothing answers any more, and the worker ends, so that
    turns go on elsewhere. Every call to the engine needs a deadline of its own.
    """

    async def open(self, label: str) -> Capabilities:
        """Find out what is there; leave it awake, unpaused, and with nobody's requests.

        It must then compute with the weights of the model's own directory, and call them ``label``.
        An engine that may have been given others since its start loads those again.

        Raises:
            ConfigError: it can't be used at all; says why, and how to start it instead.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; the engine runs on. Called once, whatever happened before."""
        ...

    async def load_weights(self, directory: Path, label: str) -> None:
        """Compute with the weights of a Hugging Face directory, all of them, from now on.

        Called while it is paused: requests under way, if any, are frozen, and new ones don't come
        before it returns. The directory stays until the next one is loaded. Verify the outcome.

        Raises:
            WeightsRefused: nothing has changed, or what had changed is as it was.
            EngineGone: nobody knows what it computes with now.
        """
        ...

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """The same with tensors, by the names of the model directory's files.

        Only asked of engines that declare ``takes_tensors``, and then instead.

        Raises:
            WeightsRefused: nothing has changed.
            EngineGone: nobody knows what it computes with now.
        """
        ...

    async def rename_weights(self, label: str) -> None:
        """Call the weights that it has so from now on: only adapters beside them are others.

        Paused, as for ``load_weights``.
        """
        ...

    async def load_lora(self, name: str, directory: Path) -> None:
        """Have an adapter ready, of a directory like PEFT's, which stays until it is unloaded.

        Only asked of engines that declare a ``lora_rank_max``; while requests are under way, and
        also while it is paused. Nobody had this name before.

        Raises:
            WeightsRefused: it can't be loaded, and nothing has changed.
        """
        ...

    async def unload_lora(self, name: str) -> None:
        """Forget it. No request uses it, and it may be paused or not."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample. An async generator: closing it early aborts the request in the engine.

        Raises:
            TurnRefused: it can never be served as asked; says why.
            EngineHeld: not now, for the engine is paused; the worker asks again.
        """
        ...

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Let no token be sampled once this returns; verify it.

        ``abort``: each request ends with a chunk ``abort`` and all of its tokens. ``keep``, if
        ``Capabilities.freezes``: they stay where they are. There may be a pause already; ``abort``
        after ``keep`` ends what is frozen. Draining (``wait``) is the worker's.
        """
        ...

    async def resume(self) -> None:
        """Sample again; verify it. Frozen requests go on with the KV they have."""
        ...

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Give this memory back. It is paused by ``abort``, and these are awake.

        Only asked for levels that ``Capabilities.sleep_levels`` has.

        Raises:
            EngineGone: nobody knows what sleeps.
        """
        ...

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take this memory again, which sleeps; still paused, by ``abort``, once it returns.

        Weights that slept at level 2 are room for weights: new ones are loaded before it resumes.

        Raises:
            EngineGone: nobody knows what sleeps.
        """
        ...

    async def check(self) -> None:
        """Raise ``EngineGone`` unless the engine lives; asked every few seconds."""
        ...

    async def preemptions(self) -> int | None:
        """How many times so far the engine has dropped a request's KV to compute it again.

        Only asked of engines that keep KV; None: it doesn't say.
        """
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Only asked for what ``Capabilities.scores`` has, and abandoned if weights change.

        Raises:
            ScoreRefused: it can never be answered as asked.
        """
        ...


class Unable:
    """What an adapter inherits to do without: methods that are never asked of its engine."""

    async def preemptions(self) -> int | None:
        """It doesn't say."""
        return None

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Not declared, so never asked for."""
        raise NotImplementedError

    async def rename_weights(self, label: str) -> None:
        """It takes no adapters, so other weights come with every version."""
        raise NotImplementedError

    async def load_lora(self, name: str, directory: Path) -> None:
        """Not declared, so never asked for."""
        raise NotImplementedError

    async def unload_lora(self, name: str) -> None:
        """Nothing is loaded."""
        raise NotImplementedError

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Not declared, so never asked for."""
        raise NotImplementedError

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Nothing sleeps."""
        raise NotImplementedError

    async def score(self, request: ScoreRequest) -> Scores:
        """Not declared, so never asked for."""
        raise NotImplementedError
