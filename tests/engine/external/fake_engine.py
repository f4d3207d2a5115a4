"""Engine around the scheduler whose model is a hash function, for scheduler tests.

:class:`DrivenEngine` is the same shell around real weights. The fake model's KV cache holds (token,
position, version) in place of numbers, so it detects mixed-up blocks and records which weights
computed the KV that a token attended to.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidegate.engine.execution.runner import (
    DecodeRows,
    ModelRunner,
    Row,
    Runner,
    StepOutput,
)
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.sampling.scoring import HIDDEN_STATE_SCORES, ScoringCapabilities
from tidegate.engine.scheduling.drafts import DraftSource
from tidegate.engine.scheduling.scheduler import EngineScheduler, StepColumns
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.kernels.native import Native
from tidegate.transport.messages import (
    LENGTH,
    RUNNING,
    STOP,
    FinishWeightUpdate,
    KvPolicy,
    Message,
    PauseMode,
    Prefill,
    SamplingParams,
    SubmitTurn,
)


def next_token(context: Sequence[int], seed: int, index: int, version: int, vocab: int) -> int:
    """Return the fake model's next token, a hash of all inputs that it may depend on."""
    reported_labels = repr((list(context), seed, index, version)).encode()
    return (
        int.from_bytes(hashlib.blake2b(reported_labels, digest_size=4).digest(), "little") % vocab
    )


@dataclass(frozen=True, slots=True)
class FakeKv:
    """One position of the fake KV cache."""

    token_id: int
    position: int
    version: int


class FakeRunner:
    """Runner that reads its context from the cache only, as a model does."""

    def __init__(self, limits: EngineLimits) -> None:
        self.version = 0
        self._limits = limits
        self._kv: dict[int, FakeKv] = {}
        self._written: set[int] = set()
        self.attended: list[list[list[int]]] = []
        """For each turn that sampled in the last step, and each of its samples, the
        versions of its KV."""
        self.had_columns = False
        """Whether the last step's rows came as columns, too."""
        self._sampling_table: object = None
        """Block table of the row that sampled last."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        self.had_columns = isinstance(rows, DecodeRows)
        if isinstance(rows, DecodeRows):
            _check_columns(rows)
        assert 0 < sum(len(row.token_ids) for row in rows) <= self._limits.max_step_tokens
        self.attended = []
        self._sampling_table = None
        self._written.clear()
        token_ids = [token for row in rows for token in self._run(row)]
        logprobs = [-float(token) for token in token_ids]
        return StepOutput(np.array(token_ids, np.int32), np.array(logprobs, np.float32))

    def _run(self, row: Row) -> Iterator[int]:
        end = row.start + len(row.token_ids)
        assert end > row.start
        for position, token_id in enumerate(row.token_ids.tolist(), row.start):
            slot = self._slot(row, position)
            assert slot not in self._written, f"two rows of a step write to slot {slot}"
            self._written.add(slot)
            self._kv[slot] = FakeKv(token_id, position, self.version)
        if row.sampling is None:
            return
        context = [self._kv[self._slot(row, position)] for position in range(end)]
        assert [kv.position for kv in context] == list(range(end))
        if (
            row.block_table is not self._sampling_table
        ):  # rows of draft tokens follow the turn's own
            self.attended.append([])
        self._sampling_table = row.block_table
        self.attended[-1].append([kv.version for kv in context])
        tokens = [kv.token_id for kv in context]
        sampling = row.sampling
        yield next_token(
            tokens, sampling.seed, sampling.index, self.version, self._limits.vocab_size
        )

    def _slot(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self._limits.block_tokens)
        return int(row.block_table[block]) * self._limits.block_tokens + offset


def _check_columns(rows: DecodeRows) -> None:
    sampling = [row.sampling for row in rows if row.sampling is not None]
    assert len(sampling) == len(rows) > 0
    assert all(one.is_drawn_whole for one in sampling)
    assert rows.columns.temperatures.tolist() == [one.temperature for one in sampling]
    assert rows.columns.top_k.tolist() == [one.top_k for one in sampling]
    top_p = np.array([one.top_p for one in sampling], np.float32)
    assert np.array_equal(rows.columns.top_p, top_p)
    assert rows.columns.seeds.tolist() == [one.seed for one in sampling]
    assert rows.columns.draws.tolist() == [one.index for one in sampling]
    assert rows.columns.positions.tolist() == [row.start for row in rows]
    assert [[token_id] for token_id in rows.columns.token_ids.tolist()] == [
        row.token_ids.tolist() for row in rows
    ]
    for table, row in zip(rows.block_tables, rows, strict=True):
        assert table is row.block_table
        assert row.adapter == ""


@dataclass(slots=True)
class ReportedTurn:
    """What the scheduler reported of one turn."""

    prompt: list[int]
    sampling: SamplingParams
    sampled_before: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    """Versions of its context's KV so far, as the provenance claims."""
    prefills: list[Prefill] = field(default_factory=list)
    finish: int = RUNNING

    def check(self, vocab: int) -> None:
        """Check that tokens and finish code are those of the turn alone in an engine."""
        for index, version in enumerate(self.versions):
            context = self.prompt + self.token_ids[:index]
            counted = self.sampled_before + index
            expected = next_token(context, self.sampling.seed, counted, version, vocab)
            assert self.token_ids[index] == expected
        stops = set(self.sampling.stop_token_ids)
        assert not stops & set(self.token_ids[:-1])
        if self.finish == STOP:
            assert self.token_ids[-1] in stops
        if self.finish == LENGTH:
            assert len(self.token_ids) == self.sampling.max_tokens
            assert self.token_ids[-1] not in stops


class FakeEngine:
    """Scheduler and fake runner, driven as the engine loop drives the real ones."""

    def __init__(
        self,
        *,
        shares_prefixes: bool = True,
        drafts: DraftSource | None = None,
        **limits: int,
    ) -> None:
        self.limits = EngineLimits(
            **(
                {
                    "max_running_turns": 4,
                    "max_step_tokens": 8,
                    "num_blocks": 16,
                    "block_tokens": 4,
                    "context_tokens_max": 64,
                    "vocab_size": 50,
                }
                | limits
            )
        )
        self.scheduler = EngineScheduler(
            self.limits,
            scoring=self._scoring(),
            shares_prefixes=shares_prefixes,
            drafts=drafts,
        )
        self.runner = self._make_runner()
        self.turns: dict[int, ReportedTurn] = {}
        self.answers: list[Message] = []
        self.recomputed_turns = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def _make_runner(self) -> FakeRunner | Runner:
        return FakeRunner(self.limits)

    def _scoring(self) -> ScoringCapabilities | None:
        return None

    def _swap_weights(self, version: int) -> None:
        assert isinstance(self.runner, FakeRunner)
        self.runner.version = version

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        sampled_before: int = 0,
        stop: Sequence[int] = (),
        seed: int = 9,
        temperature: float = 1.0,
        session: int = 0,
    ) -> int:
        turn = len(self.turns)
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=seed, temperature=temperature, stop_token_ids=list(stop)
        )
        self.scheduler.submit(
            SubmitTurn(
                turn=turn,
                token_ids=np.array(prompt, "<i4").tobytes(),
                sampling=sampling,
                priority=priority,
                sampled_before=sampled_before,
                session=session,
            )
        )
        self.turns[turn] = ReportedTurn(prompt, sampling, sampled_before)
        return turn

    def request_swap(self, version: int, mode: PauseMode, kv_policy: KvPolicy) -> None:
        self.scheduler.request_swap(
            FinishWeightUpdate(version=version, pause_mode=mode, kv_policy=kv_policy)
        )

    def settle(self) -> None:
        """Report ended turns, then answers, then do a due swap."""
        ended = self.scheduler.take_ended()
        if ended is not None:
            self._take(ended)
        self.answers += self.scheduler.take_replies()
        update = self.scheduler.swap_due()
        if update is not None:
            self._swap_weights(update.version)
            self.recomputed_turns += self.scheduler.weights_swapped(update)

    def step(self) -> dict[int, int]:
        """Run one step; return the tokens computed per row, in the order of the rows' starts."""
        self.settle()
        could = self.scheduler.can_step
        rows = self.scheduler.plan()
        assert bool(rows) == could
        if not rows:
            return {}
        computed = {number: len(row.token_ids) for number, row in enumerate(rows)}
        columns = self.scheduler.complete(self.runner.step(rows))
        if columns is not None:
            self._take(columns)
        self.settle()
        return computed

    def run(self) -> None:
        """Step until no work is left."""
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("turns that never end")

    def _take(self, columns: StepColumns) -> None:
        handles = np.frombuffer(columns.turns, "<u4").tolist()
        counts = np.frombuffer(columns.counts, "<u4").tolist() or [1] * len(handles)
        tokens = iter(np.frombuffer(columns.token_ids, "<i4").tolist())
        logprobs = iter(np.frombuffer(columns.logprobs, "<f4").tolist())
        attended = iter(self.runner.attended if isinstance(self.runner, FakeRunner) else ())
        prefills = {prefill.turn: prefill for prefill in columns.prefills}
        assert len(set(handles)) == len(handles)
        assert prefills.keys() <= set(handles)
        for handle, count, code in zip(
            handles, counts, columns.finish or bytes(len(handles)), strict=True
        ):
            turn = self.turns[handle]
            assert turn.finish == RUNNING
            turn.finish = code
            histories = next(attended, None) if count else None
            for index in range(count):
                prefill = prefills.get(handle) if index == 0 else None
                self._take_token(turn, next(tokens), columns.version, prefill)
                turn.logprobs.append(next(logprobs))
                assert histories is None or turn.kv == histories[index]
        assert next(tokens, None) is None
        self.drafted_tokens += columns.drafted_tokens
        self.accepted_tokens += columns.accepted_tokens

    def _take_token(
        self, turn: ReportedTurn, token_id: int, version: int, prefill: Prefill | None
    ) -> None:
        """Follow the protocol: a prefill replaces the KV record, a step adds one position."""
        if prefill is None:
            turn.kv.append(version)
        else:
            assert prefill.output_tokens == len(turn.token_ids)
            spans = prefill.spans
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            turn.kv = [span.version for span in spans for _ in range(span.start, span.end)]
            turn.prefills.append(prefill)
        assert len(turn.kv) == len(turn.prompt) + len(turn.token_ids)
        turn.token_ids.append(token_id)
        turn.versions.append(version)


class DrivenEngine(FakeEngine):
    """The same with a real model and KV cache; version n is the n-th of its weights."""

    def __init__(
        self,
        weights: Sequence[Weights],
        *,
        shares_prefixes: bool = True,
        drafts: DraftSource | None = None,
        native: Native | None = None,
        is_deterministic: bool = False,
        **limits: int,
    ) -> None:
        self._weights = weights
        self._native = native
        self._is_deterministic = is_deterministic
        vocab_size = weights[0].config.vocab_size
        super().__init__(
            shares_prefixes=shares_prefixes, drafts=drafts, vocab_size=vocab_size, **limits
        )

    def _make_runner(self) -> ModelRunner:
        return ModelRunner(
            self._weights[0].config,
            self._weights[0],
            num_blocks=self.limits.num_blocks,
            block_tokens=self.limits.block_tokens,
            native=self._native,
            is_deterministic=self._is_deterministic,
        )

    def _scoring(self) -> ScoringCapabilities:
        config = self._weights[0].config
        return ScoringCapabilities(
            hidden_size=config.hidden_size,
            score_kinds=("rewards" if config.labels else "logprobs", *HIDDEN_STATE_SCORES),
            labels=config.labels,
            pad_token_id=config.pad_token_id,
        )

    def _swap_weights(self, version: int) -> None:
        assert isinstance(self.runner, ModelRunner)
        self.runner.weights = self._weights[version]


def uninterrupted(prompt: list[int], max_tokens: int, *, sampled_before: int = 0) -> list[int]:
    """Return the turn's tokens when it is alone in an engine."""
    engine = FakeEngine()
    turn = engine.submit(prompt, max_tokens, sampled_before=sampled_before)
    engine.run()
    return engine.turns[turn].token_ids
