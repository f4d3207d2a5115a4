"""Replay of a run's tokens by the engine's own kernels, for `tidegate audit`.

Runs Tidegate's own engine code in this process: for each stage of a replay, the tagged version
computes the stage's context positions into the KV cache that earlier stages have filled, and
samples again, with the turn's seed, at every position that a token was sampled from. Deterministic
engines compute the same bits in any batch, so a sampled token or a log-prob that differs in one bit
proves a wrong tag, however near the two versions are. Those of others differ by rounding, because
their prompts were computed beside other ones. Unlike :mod:`replay`, it can't find faults that the
engine's own code has.

Letters in shapes: S sampled tokens of a step, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from safetensors.torch import load_file

from tidegate.engine.execution.runner import ModelRunner, Row
from tidegate.engine.execution.served_model import OwnModel, ServedModel, open_model
from tidegate.engine.models.model_weights import Quantization, Weights, fill_from_directory
from tidegate.engine.sampling.options import OptionReader, RowOptions
from tidegate.engine.sampling.sampling import RowSampling
from tidegate.errors import AuditError, ConfigError, ModelError, TurnRefused, WeightsRefused
from tidegate.observability.audit.archived_model import VersionFiles
from tidegate.observability.audit.replay import Tokens, logprob_of
from tidegate.observability.audit.replay_plan import (
    NO_ADAPTER,
    EngineBuild,
    Replay,
    ReplayedAdapter,
    Segment,
)
from tidegate.transport.messages import KvSpan, SamplingParams, SubmitTurn
from tidegate.transport.regular_files import check_regular

CACHE_BYTES_MAX = 2**30
"""Bytes of the KV cache, which holds the contexts that are replayed together."""

STEP_LOGITS_MAX = 2**25
"""Logits of one step: 2**25 in float32 are 128 MiB."""

STEP_TOKENS_MAX = 2048
"""Context positions of one step."""


def replay_by_engine(
    replays: Iterable[Replay],
    weights: Callable[[int], Path],
    progress: Callable[[int], None],
    *,
    own_weights: Callable[[str, int], Path],
    build: EngineBuild,
) -> None:
    """Fill in ``replayed`` of every segment by the engine's own code.

    A token that a deterministic engine does not sample again gets NaN, which never agrees.

    Args:
        replays: contexts whose weights are archived.
        weights: returns the directory of a version.
        progress: called with each version before it is loaded.
        own_weights: returns the directory of a version that the named adapter counts itself.
        build: how the run's engines computed.

    Raises:
        AuditError: weights can't be loaded, or this machine can't compute the model as the engines
            did.
    """
    todo = list(replays)
    engine = _ReplayEngine(todo, weights, own_weights, build)
    for batch in engine.batches(todo):
        engine.replay(batch, progress)


class _ReplayEngine:
    """An engine's runner whose weights are exchanged for each stage of the replays."""

    def __init__(
        self,
        replays: list[Replay],
        weights: Callable[[int], Path],
        own_weights: Callable[[str, int], Path],
        build: EngineBuild,
    ) -> None:
        self._weights_directory = weights
        self._own_weights = own_weights
        self._model = _open_model(self._files(_weights_due(replays[0])).base, build)
        self._block_tokens = build.block_tokens
        block_bytes = self._model.kv_token_bytes() * build.block_tokens
        needed = [self._blocks(replay) for replay in replays]
        blocks = min(sum(needed), max(1, CACHE_BYTES_MAX // block_bytes))
        self._blocks_max = max(blocks, *needed)
        runner = self._model.make_runner(
            num_blocks=self._blocks_max, block_tokens=build.block_tokens
        )
        assert isinstance(runner, ModelRunner)  # open_model refuses others if deterministic
        self._runner = runner
        is_mixture = any(layer.has_experts for layer in runner.config.layers)
        if is_mixture and build.dtype != "float32" and not build.is_deterministic:
            raise AuditError("rounding decides which experts a token is routed to")
        self._is_deterministic = build.is_deterministic
        self._computed: dict[int, int] = {}
        """Positions of a replay that another one computes, by the replay's id."""
        self._options = OptionReader(vocab_size=self._model.vocab_size, max_running_turns=1)

    def _blocks(self, replay: Replay) -> int:
        return -(-replay.stages[-1].end // self._block_tokens)

    def batches(self, replays: list[Replay]) -> Iterator[list[Replay]]:
        """Yield replays whose contexts fit into the KV cache together."""
        batch: list[Replay] = []
        free = self._blocks_max
        # Ordered by version, so that a batch needs few versions.
        for replay in sorted(replays, key=lambda r: (r.stages[0].version, r.stages[-1].version)):
            if self._blocks(replay) > free:
                yield batch
                batch, free = [], self._blocks_max
            batch.append(replay)
            free -= self._blocks(replay)
        if batch:
            yield batch

    def replay(self, batch: list[Replay], progress: Callable[[int], None]) -> None:
        """Compute all stages of a batch, in ascending order of versions as far as possible."""
        tables: dict[int, list[int]] = {}
        first_block = 0
        for replay in batch:
            tables[id(replay)] = list(range(first_block, first_block + self._blocks(replay)))
            first_block += self._blocks(replay)
        due: defaultdict[tuple[ReplayedAdapter, int], list[Replay]] = defaultdict(list)
        for replay in batch:
            due[_weights_due(replay)].append(replay)
        key = (NO_ADAPTER, -1)
        while due:
            key = min((each for each in due if each > key), default=min(due))
            progress(key[1])
            ready = due.pop(key)
            self._load(key)
            self._share_prompts(ready, tables)
            phases: defaultdict[int, list[_Sample]] = defaultdict(list)
            for replay in ready:
                for sample in self._samples(replay, tables[id(replay)]):
                    phases[sample.phase].append(sample)
            for _, samples in sorted(phases.items()):
                self._compute(samples)
            for replay in ready:
                replay.stages_done += 1
                if replay.stages_done < len(replay.stages):
                    due[_weights_due(replay)].append(replay)

    def _share_prompts(self, ready: list[Replay], tables: dict[int, list[int]]) -> None:
        """Let contexts that begin with the same tokens share the blocks of these, computed once."""
        prompts: dict[tuple[str, bytes], tuple[Replay, int]] = {}
        self._computed.clear()
        for replay in ready:
            stage = _stage(replay)
            first = min(segment.position for segment in replay.segments) - 1
            shared = min(first, stage.end) // self._block_tokens
            if stage.start or not shared:
                continue
            tokens = replay.context[: shared * self._block_tokens].tobytes()
            leader, _ = prompts.setdefault((replay.adapter.name, tokens), (replay, shared))
            if leader is not replay:
                tables[id(replay)][:shared] = tables[id(leader)][:shared]
                self._computed[id(replay)] = shared * self._block_tokens

    def _files(self, key: tuple[ReplayedAdapter, int]) -> VersionFiles:
        adapter, version = key
        own = self._own_weights(adapter.name, version) if adapter.name else None
        return VersionFiles.find(version, self._weights_directory, own)

    def _load(self, key: tuple[ReplayedAdapter, int]) -> None:
        """Fill the runner's weights with an archived version and all of its adapters."""
        adapter, version = key
        files = self._files(key)
        weights = self._runner.weights
        assert isinstance(weights, Weights)
        try:
            fill_from_directory(weights, files.base)
            for path in files.overlays:
                check_regular(path)
                for name, tensor in load_file(path).items():
                    weights.load(name, tensor)
            adapters = {}
            for name, (path, scale) in files.adapters.items():
                check_regular(path)
                adapters[name] = weights.make_adapter(load_file(path), scale)
            weights.adapters = adapters
        except (ModelError, WeightsRefused, OSError) as error:
            of = f" of adapter {adapter.name!r}" if adapter.name else ""
            raise AuditError(
                f"the archived weights v{version}{of} can't be loaded: {error}"
            ) from error
        self._runner.swap(weights)

    def _samples(self, replay: Replay, table: list[int]) -> Iterator["_Sample"]:
        """Yield a stage's rows in the order of positions: chunks, and single sampling positions.

        As the engine does, prompts are computed as chunks and output token by token. Chunks have
        even phases and output odd ones: phases are computed one after the other.
        """
        stage = _stage(replay)
        drawn: defaultdict[int, list[tuple[Segment, int]]] = defaultdict(list)
        for segment in replay.segments:
            # Token i of a segment is sampled after the position before it.
            first = max(stage.start, segment.position - 1)
            for position in range(first, min(stage.end, _end(segment) - 1)):
                drawn[position].append((segment, position + 1 - segment.position))
        start = stage.start + self._computed.pop(id(replay), 0)
        phase = 0
        for position in sorted(drawn):
            if position > start and phase % 2:
                phase += 1
            yield from self._chunks(replay, table, start, position, phase)
            phase |= 1
            row = Row(replay.context[position : position + 1], position, table, None)
            row.adapter = replay.adapter.name
            for segment, token in drawn[position]:
                sampling = self._sampling(replay, segment, token)
                yield _Sample(
                    replace(row, sampling=sampling), phase, segment, token, replay.context
                )
            start = position + 1
        yield from self._chunks(replay, table, start, stage.end, phase + phase % 2)

    def _chunks(
        self, replay: Replay, table: list[int], start: int, end: int, phase: int
    ) -> Iterator["_Sample"]:
        """Yield rows that compute the KV of positions ``[start, end)`` and sample nothing."""
        for first in range(start, end, STEP_TOKENS_MAX):
            tokens = replay.context[first : min(end, first + STEP_TOKENS_MAX)]
            row = Row(tokens, first, table, None, adapter=replay.adapter.name)
            yield _Sample(row, phase)

    def _sampling(self, replay: Replay, segment: Segment, token: int) -> RowSampling:
        turn = segment.sampling
        index = segment.first_token + token
        params = turn.options or SamplingParams(
            max_tokens=turn.length, temperature=turn.temperature, top_k=turn.top_k, top_p=turn.top_p
        )
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=turn.seed,
            index=index,
            options=self._row_options(replay, params, turn.start, index),
        )

    def _row_options(
        self, replay: Replay, params: SamplingParams, start: int, index: int
    ) -> RowOptions | None:
        """Return the turn's options as they are after ``index`` output tokens."""
        known = replay.context[: start + index].astype("<i4")
        # Stop strings end a turn, and change no probability; they would need the tokenizer.
        sampling = msgspec.structs.replace(params, stop_strings=[])
        message = SubmitTurn(
            turn=0, token_ids=known.tobytes(), sampling=sampling, sampled_before=index
        )
        try:
            options = self._options.read(message, replay.context)
        except TurnRefused as error:
            raise AuditError(
                f"a turn's recorded sampling options are refused now: {error}. Audit with the "
                "version that recorded the run, or leave --exact out"
            ) from error
        if options is None and params.stop_strings:
            return RowOptions(sampling, replay.context, start)
        return options

    def _compute(self, samples: list["_Sample"]) -> None:
        """Run rows in steps of limited size, and store what they sample."""
        step: list[_Sample] = []
        tokens = sampled = 0
        sampled_max = max(1, STEP_LOGITS_MAX // self._model.vocab_size)
        for sample in samples:
            count, draws = len(sample.row.token_ids), sample.segment is not None
            if step and (tokens + count > STEP_TOKENS_MAX or sampled + draws > sampled_max):
                self._run(step)
                step, tokens, sampled = [], 0, 0
            step.append(sample)
            tokens, sampled = tokens + count, sampled + draws
        if step:
            self._run(step)

    def _run(self, step: list["_Sample"]) -> None:
        rows = [sample.row for sample in step]
        output, logits = self._runner.step_with_logits(rows)
        drawn = [(s.segment, s.token, s.context) for s in step if s.segment is not None]
        for n, (segment, token, context) in enumerate(drawn):
            is_same = output.token_ids[n] == segment.token_ids[token] and n not in output.failures
            if is_same:
                segment.replayed[token] = output.logprobs[n]
            elif not self._is_deterministic:
                # Rounding decided between two tokens: what the recorded one's log-prob would be.
                segment.replayed[token] = logprob_of(logits[n], segment, token, context)


@dataclass(slots=True)
class _Sample:
    """A row of a step, and the recorded token that it samples again, if any."""

    row: Row
    phase: int
    """Rows of a lower phase are computed before."""
    segment: Segment | None = None
    token: int = 0
    """Index of the token in the segment."""
    context: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """The replay's context, of a row that samples."""


def _stage(replay: Replay) -> KvSpan:
    return replay.stages[replay.stages_done]


def _weights_due(replay: Replay) -> tuple[ReplayedAdapter, int]:
    """Return what reads the context next: a version, and the adapter only if it is the adapter's
    own, because the weights of a version of the run include all of its adapters."""
    adapter = replay.adapter if replay.adapter.has_own_versions else NO_ADAPTER
    return adapter, _stage(replay).version


def _end(segment: Segment) -> int:
    return segment.position + len(segment.token_ids)


def _open_model(directory: Path, build: EngineBuild) -> ServedModel:
    """Open an archived model as the run's engines did.

    Raises:
        AuditError: this machine can't compute it so.
    """
    if build.dtype not in ("float32", "bfloat16"):
        raise AuditError(
            "an exact audit needs engines that computed in float32 or bfloat16, and these report "
            f"{build.dtype or 'no dtype'}; leave --exact out"
        )
    quantization: dict[str, Quantization] = {"int8": "int8", "fp8": "fp8"}
    try:
        model = open_model(
            directory,
            "float32" if build.dtype == "float32" else "bfloat16",
            is_deterministic=build.is_deterministic,
            quantization=quantization.get(build.quantization),
        )
    except (ConfigError, ModelError) as error:
        raise AuditError(
            f"{directory} can't be computed exactly on this machine: {error}. Audit on a machine "
            "like the engines', or leave --exact out"
        ) from error
    if not isinstance(model, OwnModel):
        raise AuditError(f"the engines computed {directory} by transformers")
    return model
