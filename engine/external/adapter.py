"""Interface of external-engine adapters: the calls with which a run uses vLLM or SGLang.

An adapter translates to the engine's API and declares what the engine cannot do. The worker handles
the wire protocol, turns and step messages in the same way for every kind of engine
(docs/vllm-engine.md).

An adapter runs on one asyncio loop. Its control calls (all but ``generate``, ``score``, ``check``
and ``preemptions``) are made one at a time.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidegate.errors import EngineGone
from tidegate.transport.attachments import Attachment, AttachmentName
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SamplingParams
from tidegate.transport.scoring import ScoreKind
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

Ended = Literal["stop", "length", "abort"]
"""Why a request ended: it sampled a stop token; it reached ``max_tokens``; the
engine aborted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one running engine can do, as its adapter reports it. A default means: it can't."""

    engine: str
    """Kind and version, shown to users: ``vllm 0.32.0``."""
    context_tokens_max: int
    running_turns_max: int
    """Limit of concurrent requests; the worker queues further turns by priority."""
    has_processed_logprobs: bool = False
    """Whether log-probs are of the distribution sampled from, after temperature, top-k and so on.
    If not, only turns whose options do not change raw log-probs are served."""
    freezes: bool = False
    """Whether ``pause("keep")`` keeps requests and their KV in place. If not, the worker aborts
    them and requests the rest after the pause, so that the KV is recomputed."""
    keeps_kv: bool = False
    """Whether frozen requests can continue with their old KV under new weights *and* the engine
    then reports where versions change (``GeneratedChunk.labels``) *and* sends every token at once
    if ``stream_interval_tokens`` is 1. Needs ``freezes``; serves ``kv_policy="keep"``."""
    sampling: frozenset[str] = frozenset()
    """Fields of ``SamplingParams`` that the engine implements exactly as documented, beyond
    ``max_tokens`` and ``temperature``. A turn that sets another field is refused, by name."""
    top_logprobs_max: int = 0
    """Limit of top log-probs per token; ``top_logprobs`` counts as a field."""
    scores: frozenset[ScoreKind] = frozenset()
    """Kinds of scores that ``score`` can answer."""
    dtype: str = ""
    """Compute dtype: ``float32``, ``bfloat16`` or ``float16``; empty if unknown."""
    num_blocks: int = 0
    """Number of KV blocks, for the statistics; 0 if unknown."""
    block_tokens: int = 0
    media: frozenset[MediaKind] = frozenset()
    """Kinds of media that the model accepts beside tokens."""
    takes_tensors: bool = False
    """Whether new weights are passed to ``load_tensors``, so that none are written to disk."""
    takes_patches: bool = False
    """Whether changed elements alone can be passed to ``load_patches``."""
    sleep_levels: frozenset[SleepLevel] = frozenset()
    """Supported sleep levels; see :mod:`tidegate.transport.sleep_messages`."""
    lora_rank_max: int = 0
    """Largest rank of LoRA adapters, which are loaded from files; 0 if LoRA is not supported."""
    lora_fills_matrices: bool = False
    """Whether an adapter of a query, key or value projection must have all three, and one of a gate
    or up projection both, because they are one matrix in the engine."""
    lora_lacks: str = ""
    """Why LoRA is not supported, or how to start the engine so that it is."""
    lora_spoils_others: str = ""
    """Why turns without an adapter cannot run beside turns with one; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to generate tokens after ``token_ids``."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    """Sampling options; ``max_tokens`` and ``min_tokens`` are reduced by the turn's tokens so
    far."""
    sampled_before: int = 0
    """Number of the last ``token_ids`` that are the turn's own output."""
    salt: str
    """Cache salt: KV computed under another salt may be of other weights, and must not be used."""
    lora: str = ""
    """Name under which :meth:`EngineAdapter.load_lora` loaded the adapter; empty for none."""
    media: Sequence[Media] = ()
    """Media in the order of their placeholders in ``token_ids``."""
    stream_interval_tokens: int = 1
    """Number of tokens that the engine may collect before it sends them. It sends a request's last
    tokens at once, also if the request is aborted by a pause."""


LORA_NAMES = "tidegate-lora-"
"""Prefix of the adapter names given to engines, by which leftovers are recognised."""


class VersionLabel(NamedTuple):
    """The engine's label of the weights that sampled output tokens ``[start, end)``."""

    label: str
    """Label that :meth:`EngineAdapter.load_weights` was given with the weights."""
    start: int
    end: int


class TopLogprobs(NamedTuple):
    """Top log-probs of each token of a chunk: C tokens, k each."""

    token_ids: list[int]
    """[C * k], most likely first."""
    logprobs: list[float]
    """[C * k]"""

    def attachments(self, top_logprobs: int) -> list[Attachment]:
        """Return both columns as attachments of a chunk, with ``top_logprobs`` tokens each."""
        ids = np.array(self.token_ids, np.int32).reshape(-1, top_logprobs)
        logprobs = np.array(self.logprobs, np.float32).reshape(-1, top_logprobs)
        return [Attachment.of(0, "top_ids", 0, ids), Attachment.of(0, "top_logprobs", 0, logprobs)]


def of_positions(name: AttachmentName, entries: npt.NDArray[np.integer[Any]]) -> Attachment:
    """Return the entries [P, *shape] of the context's first P positions as an attachment of a
    chunk, in the smallest dtype that holds them."""
    return Attachment.of(0, name, 0, entries.astype(np.min_scalar_type(entries.max(initial=0))))


class GeneratedChunk(NamedTuple):
    """Further tokens of a request, as they arrive; possibly none."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log, one per token."""
    ended: Ended | None = None
    """Set in the last chunk only. With ``stop`` the chunk contains the stop token."""
    labels: Sequence[VersionLabel] | None = None
    """In the last chunk, labels of all the request's tokens; None if the engine reports none."""
    attachments: Sequence[Attachment] = ()
    """Attachments of turn 0; those by output token start at 0, the chunk's first token."""


@dataclass(frozen=True, slots=True)
class ExternalScores:
    """Scores of given tokens; fields that were not requested are empty."""

    logprobs: Sequence[float] = ()
    """[P], one per position scored."""
    top: TopLogprobs | None = None
    values: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request to score given tokens. The engine must not use cached KV of any salt."""

    token_ids: Sequence[int]
    score_kind: ScoreKind
    start: int
    top_logprobs: int
    temperature: float


class EngineAdapter:
    """One external engine, through its own API.

    An adapter need not implement the methods of capabilities that it does not declare.
    Any method may raise ``EngineGone``: the engine no longer answers, and the worker ends, so that
    its turns continue elsewhere. Every call to the engine needs its own deadline.
    """

    capabilities: Capabilities
    """What :meth:`open` returned; set by the worker."""

    async def open(self, label: str) -> Capabilities:
        """Connect to the engine; leave it awake, unpaused and without requests.

        It must then serve the model directory's weights under the name ``label``. An engine that
        may have been given other weights since its start loads those again.

        Raises:
            ConfigError: it cannot be used; the message says why, and how to start it instead.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close connections; the engine keeps running. Called once, whatever happened before."""
        raise NotImplementedError

    async def load_weights(self, directory: Path, label: str) -> None:
        """Load all weights of a Hugging Face directory, and verify the outcome.

        Called while the engine is paused: current requests, if any, are frozen, and no new ones are
        made before it returns. The directory stays until the next one is loaded.

        Raises:
            WeightsRefused: nothing has changed, or the change has been undone.
            EngineGone: the engine's weights are unknown.
        """
        raise NotImplementedError

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load weights like ``load_weights``, from tensors named as in the model directory.

        Called instead of it if the engine declares ``takes_tensors``.

        Raises:
            WeightsRefused: nothing has changed.
            EngineGone: the engine's weights are unknown.
        """
        raise NotImplementedError

    async def load_patches(self, file: Path, label: str) -> None:
        """Change elements of the current weights, as :mod:`.vllm_patches` writes them to a file.

        Called instead of ``load_weights`` if the engine declares ``takes_patches``.

        Raises:
            WeightsRefused: the weights are unknown until ``load_weights``, which is called next.
            EngineGone: the engine does not answer as it should.
        """
        raise NotImplementedError

    async def rename_weights(self, label: str) -> None:
        """Give the current weights a new label, because a version changes adapters only.

        Called while the engine is paused, like ``load_weights``.
        """
        raise NotImplementedError

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter from a PEFT-style directory, which stays until the adapter is unloaded.

        Called only if ``lora_rank_max`` is declared, with requests in flight, and also while
        paused. The name has not been used before.

        Raises:
            WeightsRefused: it cannot be loaded, and nothing has changed.
        """
        raise NotImplementedError

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no request uses; the engine may be paused or not."""
        raise NotImplementedError

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Sample tokens. An async generator: closing it early aborts the request in the engine.

        Raises:
            TurnRefused: it can never be served as asked; says why.
            EngineHeld: the engine is paused; the worker asks again.
        """
        raise NotImplementedError

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Stop sampling, and verify that no token is sampled after this returns.

        ``abort``: each request ends with a chunk ``abort`` that completes its tokens. ``keep``, if
        ``Capabilities.freezes``: requests stay in place. The engine may be paused already;
        ``abort`` after ``keep`` ends the frozen requests. Draining (``wait``) is done by the
        worker.
        """
        raise NotImplementedError

    async def resume(self) -> None:
        """Sample again, and verify it. Frozen requests continue with their KV."""
        raise NotImplementedError

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release this memory, which is awake; the engine is paused with ``abort``.

        Called only for levels in ``Capabilities.sleep_levels``.

        Raises:
            EngineGone: it is unknown which memory sleeps.
        """
        raise NotImplementedError

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate this memory again, which sleeps; the engine stays paused with ``abort``.

        Weights that slept at level 2 are uninitialised: new ones are loaded before the engine
        resumes.

        Raises:
            EngineGone: it is unknown which memory sleeps.
        """
        raise NotImplementedError

    async def check(self) -> None:
        """Raise ``EngineGone`` unless the engine is alive; called every few seconds."""
        raise NotImplementedError

    async def preemptions(self) -> int | None:
        """Return how often the engine has dropped a request's KV to recompute it; None if unknown.

        Called only if ``keeps_kv`` is declared.
        """
        return None

    async def score(self, request: ScoreRequest) -> ExternalScores:
        """Score given tokens, for kinds in ``Capabilities.scores``; cancelled by weight updates.

        Raises:
            ScoreRefused: it can never be answered as asked.
        """
        raise NotImplementedError


def adapter_failed(defect: BaseException) -> EngineGone:
    """Return the error that ends the worker because of a defect in its adapter."""
    error = EngineGone(f"the adapter failed: {type(defect).__name__}: {defect}")
    error.__cause__ = defect
    return error
