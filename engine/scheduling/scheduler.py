"""Continuous-batching scheduler of an engine: plans each step's rows, and takes in its results.

Pure: the worker's loop calls ``plan`` for the rows to compute and ``complete`` with what was
sampled. A step takes decodes first, then chunks of prefills, then draft tokens, within the step
budget. The running set (``sequence_queues.py``) decides which sequences run, and in which KV
blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.engine.execution.images import SequenceImages
from tidegate.engine.execution.runner import Row, RowSampling, StepOutput
from tidegate.engine.execution.step_layout import AdapterVersion
from tidegate.engine.memory.out_of_memory import StepBudget
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.scoring import ScoringCapabilities
from tidegate.engine.scheduling.adapter_versions import AdapterVersions
from tidegate.engine.scheduling.decode_batch import DecodeBatch, can_decode_plainly
from tidegate.engine.scheduling.drafts import DraftSource, Speculation
from tidegate.engine.scheduling.pauses import PauseGate, ends_turns, lets_finish
from tidegate.engine.scheduling.score_queue import ScoreQueue, no_adapter
from tidegate.engine.scheduling.sequence_queues import SequenceQueues
from tidegate.engine.scheduling.sequences import (
    PART_OF_WEIGHTS,
    AcceptedTokens,
    EngineLimits,
    EngineSequence,
    admit,
)
from tidegate.engine.scheduling.step_columns import (
    EndedTurn,
    SampledRows,
    ended_columns,
    failures_of,
    join_columns,
)
from tidegate.engine.scheduling.step_columns import StepColumns as StepColumns
from tidegate.errors import ScoreRefused, TurnRefused
from tidegate.transport import messages, scoring
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    RUNNING,
    AdapterNeeded,
    FinishWeightUpdate,
    Message,
    PauseMode,
    SubmitTurn,
    SwapAdapter,
    TurnsResumed,
)
from tidegate.transport.scoring import ScoreTokens


class StepPlanner:
    """Assigns one step's token budget and KV blocks to sequences."""

    def __init__(self, queues: SequenceQueues, speculation: Speculation | None) -> None:
        self._queues = queues
        self._prefixes = queues.prefixes
        self._speculation = speculation
        self._planned: list[EngineSequence] = []
        self.decodes = 0
        """Number of sequences of the last plan that decode; the others prefill."""
        self.drafted = 0
        """Number of draft tokens of the last plan."""

    def plan(self, tokens: int, version: int, *, may_start: bool) -> list[EngineSequence]:
        """Return the sequences of a step of at most ``tokens`` tokens, with chunks and drafts set.

        ``version`` is the live weights'. Waiting sequences are admitted only if ``may_start``.
        """
        planned: list[EngineSequence] = []
        self._planned = planned
        self.decodes = self._plan_decodes()
        tokens_left = tokens - self.decodes
        if self.decodes < len(self._queues.running):
            for sequence in self._queues.running:
                if sequence.is_prefilling and tokens_left > 0:
                    tokens_left -= self._plan_chunk(sequence, tokens_left)
        if tokens_left > 0 and may_start:
            for sequence in self._queues.start_waiting(version, tokens):
                tokens_left -= self._plan_chunk(sequence, tokens_left)
                if tokens_left == 0:
                    break
        self.drafted = 0
        if self._speculation is not None:
            self._plan_drafts(self._speculation, tokens_left)
        return planned

    def _plan_decodes(self) -> int:
        """Plan one token for each sequence that is past its prefill and has room for it."""
        planned = self._planned
        for sequence in self._queues.running.copy():
            if sequence.is_prefilling:
                # Recomputed sequences can lack blocks. They get a first one here, in the order of
                # rank, because a sequence that is already planned must not be preempted.
                if sequence.computed >= sequence.block_tokens_held:
                    self._queues.grow(sequence)
                continue
            if sequence.computed < sequence.block_tokens_held or self._queues.grow(sequence):
                sequence.chunk_tokens, sequence.drafted = 1, 0
                planned.append(sequence)
        return len(planned)

    def _plan_chunk(self, sequence: EngineSequence, tokens_left: int) -> int:
        """Plan a prefill chunk, as large as the sequence's blocks and the step's budget allow."""
        self._prefixes.reuse(sequence, self._prefixes.find(sequence))
        end = min(sequence.length, sequence.computed + tokens_left)
        self._queues.grow_freely(sequence, end)
        sequence.drafted = 0
        sequence.chunk_tokens = min(end, sequence.block_tokens_held) - sequence.computed
        if sequence.chunk_tokens > 0:
            self._planned.append(sequence)
            self._prefixes.share_planned(sequence)
        return sequence.chunk_tokens

    def _plan_drafts(self, speculation: Speculation, tokens_left: int) -> None:
        """Add draft tokens to decoding sequences, as far as the step's budget and free blocks
        allow."""
        decodes = [sequence for sequence in self._planned if not sequence.is_prefilling]
        is_timed = len(decodes) == len(self._planned)
        for sequence, draft in speculation.draft(decodes, tokens_left, is_timed=is_timed):
            self._queues.grow_freely(
                sequence, sequence.length + len(draft), spared_blocks=len(self._queues.running)
            )
            sequence.drafted = min(len(draft), sequence.block_tokens_held - sequence.length)
            sequence.tokens[sequence.length : sequence.length + sequence.drafted] = draft[
                : sequence.drafted
            ]
            self.drafted += sequence.drafted


@dataclass(frozen=True, slots=True)
class _PendingTurn:
    """A submitted sequence whose grammars are still being compiled."""

    message: SubmitTurn
    arrival: int
    futures: list[Future[Any]]


@dataclass(frozen=True, slots=True)
class _Aside:
    """A turn or scoring request that waits for an adapter that is not in memory."""

    message: SubmitTurn | ScoreTokens
    arrival: int

    @property
    def adapter(self) -> AdapterVersion:
        """Name of the adapter, and the version asked for."""
        message = self.message
        options = message.sampling if isinstance(message, SubmitTurn) else message
        assert options.adapter_version is not None
        return options.adapter, options.adapter_version


class EngineScheduler:
    """All sequences and scoring requests of one engine, and the version of its live weights."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        options: OptionReader | None = None,
        scoring: ScoringCapabilities | None = None,
        shares_prefixes: bool = True,
        drafts: DraftSource | None = None,
        adapters: AdapterVersions | None = None,
        images: SequenceImages | None = None,
    ) -> None:
        """``adapters`` has the adapters with versions of their own; None serves none.
        ``images`` reads the images of turns; None: the model reads none.
        ``options`` reads the sequences' sampling options; None serves neither text options
        nor custom logits processors. ``scoring`` says what the model can score; None:
        nothing. ``shares_prefixes`` and ``drafts`` change speed only; tests compare runs
        with and without them."""
        self.version = 0
        """Version of the live weights."""
        self._limits = limits
        self._options = options or OptionReader(
            vocab_size=limits.vocab_size, max_running_turns=limits.max_running_turns
        )
        self._images = images
        self._queues = SequenceQueues(limits, shares_prefixes=shares_prefixes)
        self.scores = ScoreQueue(
            limits, scoring or ScoringCapabilities(hidden_size=1), self._queues
        )
        """Queue of the scoring requests."""
        self.sessions = self._queues.sessions
        """Contexts that are kept for the next turns of their rollouts."""
        self._prefixes = self._queues.prefixes
        self._speculation = None if drafts is None else Speculation(drafts)
        self._planner = StepPlanner(self._queues, self._speculation)
        self._adapters: frozenset[str] = frozenset()
        """Names of the live version's LoRA adapters."""
        self.adapters = adapters or AdapterVersions()
        """LoRA adapters with weight versions of their own."""
        self.scores.on_ended = self._release_adapter
        self._aside: dict[tuple[bool, int], _Aside] = {}
        """Turns and scoring requests whose adapter is not in memory, in the order of arrival, by
        (is a scoring request, its number)."""
        self._gate = PauseGate()
        self._budget = StepBudget(limits.max_step_tokens)
        self._clears_cache = False
        """Whether a pending pause is to empty the prefix cache when it takes effect."""
        self._turns: dict[int, EngineSequence] = {}
        """Every running or waiting sequence, by handle; scoring requests are in ``scores``."""
        self._preparing: dict[int, _PendingTurn] = {}
        """Sequences whose grammars are being compiled, by handle; disjoint from ``_turns``."""
        self._arrivals = 0
        self._planned: list[EngineSequence] = []
        self._batch: DecodeBatch | None = None
        """The planned sequences, if the step before decoded the same ones."""
        self._ended: list[EndedTurn] = []
        self._replies: list[Message] = []

    # ------------------------------------------------------------ requests

    def submit(self, message: SubmitTurn) -> None:
        """Queue a sequence once its grammars are compiled, ranked by its arrival.

        A later refusal is returned by ``take_replies``.

        Raises:
            tidegate.errors.TurnRefused: it can never be served as asked.
        """
        handle = message.turn
        if handle in self._turns or handle in self._preparing or (False, handle) in self._aside:
            raise TurnRefused(
                f"turn handle {handle} belongs to a turn that has not ended; use each handle once"
            )
        self._arrivals += 1
        if futures := self._options.prepare(message):
            self._preparing[message.turn] = _PendingTurn(message, self._arrivals - 1, futures)
        else:
            self._admit(message, self._arrivals - 1)

    def _admit_prepared(self) -> None:
        """Queue the sequences whose grammars have been compiled, or refuse them if
        compilation failed."""
        ready = [
            pending
            for pending in self._preparing.values()
            if all(f.done() for f in pending.futures)
        ]
        for pending in ready:
            del self._preparing[pending.message.turn]
            try:
                self._admit(pending.message, pending.arrival)
            except TurnRefused as error:
                self._reply_turn_failed(pending.message.turn, str(error))

    def _admit(self, message: SubmitTurn, arrival: int) -> None:
        self.scores.refuse_turns()
        sampling = message.sampling
        if sampling.adapter_version is not None and sampling.adapter:
            self._refuse_own_versions(TurnRefused)
            self._put_aside((False, message.turn), _Aside(message, arrival))
            return
        if not self._has_adapter(sampling.adapter):
            raise TurnRefused(no_adapter(sampling.adapter, self.version, self._adapters))
        self._queue(admit(message, self._limits, arrival, self._options, self._images))

    def _queue(self, sequence: EngineSequence) -> None:
        self._turns[sequence.handle] = sequence
        self._queues.queue(sequence)

    # ------------------------------------------------------------ adapters of own versions

    def _refuse_own_versions(self, error: type[TurnRefused] | type[ScoreRefused]) -> None:
        if not self.adapters.versions_max:
            raise error(
                "this engine serves no LoRA adapters with weight versions of their own; use a CPU "
                "engine of one process, or publish_adapter"
            )

    def _put_aside(self, key: tuple[bool, int], request: _Aside) -> None:
        """Admit a request now if its adapter is in memory and no earlier one is held up; otherwise
        keep it, and ask for the adapter."""
        self._aside[key] = request
        self._admit_aside()

    def _admit_aside(self) -> None:
        """Admit the requests whose adapter is in memory, in order, up to the first one for which
        all versions in memory are in use: busy adapters cannot starve others."""
        adapters = self.adapters
        for key, request in list(self._aside.items()):
            name, wanted = request.adapter
            version = adapters.key_of(name, wanted)
            if adapters.is_held(version):
                del self._aside[key]
                self._admit_held(request, version)
                continue
            is_new = adapters.request(version)
            if is_new is None:
                return
            if is_new:
                self._replies.append(AdapterNeeded(name=name, version=version[1]))

    def _admit_held(self, request: _Aside, adapter: AdapterVersion) -> None:
        message = request.message
        try:
            if isinstance(message, ScoreTokens):
                self.scores.submit(message, request.arrival, adapter[1])
            else:
                sequence = admit(
                    message, self._limits, request.arrival, self._options, self._images
                )
                sequence.use_version(adapter[1])
                sequence.is_pinned = request.adapter == adapter
                self._queue(sequence)
        except (TurnRefused, ScoreRefused) as error:
            self._refuse_aside(request, str(error))
        else:
            self.adapters.use(adapter)

    def _refuse_aside(self, request: _Aside, reason: str) -> None:
        if isinstance(request.message, ScoreTokens):
            self._reply_score_failed(request.message.request_id, reason)
        else:
            self._reply_turn_failed(request.message.turn, reason)

    def _reply_turn_failed(self, handle: int, reason: str) -> None:
        self._replies.append(messages.TurnFailed(turn=handle, message=cut(reason)))

    def _reply_score_failed(self, request_id: int, reason: str) -> None:
        self._replies.append(scoring.ScoreFailed(request_id=request_id, message=cut(reason)))

    def _release_adapter(self, sequence: EngineSequence) -> None:
        if (adapter := sequence.own_version) is not None:
            self.adapters.release(adapter)
            if self._aside:
                self._admit_aside()

    def adapter_loaded(
        self,
        adapter: AdapterVersion,
        tensors: object,
        *,
        is_live: bool = False,
        is_staged: bool = False,
    ) -> None:
        """Take an adapter's version into memory, and admit the turns that wait for it; the flags
        are those of :meth:`AdapterVersions.add`."""
        self.adapters.add(adapter, tensors, is_live=is_live, is_staged=is_staged)
        self._admit_aside()

    def swap_adapter(self, swap: SwapAdapter) -> int | None:
        """Make a loaded version its adapter's live one, before the next step; return how many of
        its running turns recompute KV. None if the version is not in memory."""
        new = (swap.name, swap.version)
        if not self.adapters.is_held(new):
            return None
        self.adapters.swap(new)
        recomputed = 0
        for sequence in [
            sequence
            for sequence in self._turns.values()
            if sequence.adapter == swap.name
            and not sequence.is_pinned
            and sequence.adapter_version not in (PART_OF_WEIGHTS, swap.version)
        ]:
            if sequence.is_running and ends_turns(swap.pause_mode):
                self._queues.remove(sequence)
                self._report_end(sequence, ABORT)
            elif not (sequence.is_running and lets_finish(swap.pause_mode)):
                recomputed += self._move_to(sequence, new, swap)
        self.adapters.end_swap(new)
        self._admit_aside()
        return recomputed

    def _move_to(
        self, sequence: EngineSequence, adapter: AdapterVersion, swap: SwapAdapter
    ) -> bool:
        """Continue a sequence with another version; return whether it recomputes KV."""
        old, recomputes = sequence.own_version, False
        assert old is not None
        sequence.history.swap(old[1], sequence.computed)
        sequence.use_version(adapter[1])
        self.adapters.use(adapter)
        self.adapters.release(old)
        if sequence.is_running:
            if swap.kv_policy == "recompute":
                recomputes = self._queues.recompute(sequence, adapter[1])
            self._prefixes.leave(sequence, self.version)
        return recomputes

    def unload_adapter(self, name: str, version: int | None) -> None:
        """Drop an adapter, or one version of it, and refuse the turns that use it."""

        def is_meant(adapter: AdapterVersion) -> bool:
            return adapter[0] == name and version in (None, adapter[1])

        reason = (
            f"adapter {name!r}{'' if version is None else f' v{version}'} is not loaded (any more)"
        )
        for key, request in list(self._aside.items()):
            if is_meant(request.adapter):
                del self._aside[key]
                self._refuse_aside(request, reason)
        for sequence in list(self._turns.values()):
            if (adapter_of := sequence.own_version) is not None and is_meant(adapter_of):
                self._refuse(sequence, reason)
        self._replies += self.scores.refuse(is_meant, reason)
        for adapter in self.adapters.versions_of(name):
            if is_meant(adapter):
                self.adapters.remove(adapter)
        if version is None:
            self.adapters.live.pop(name, None)
        self._admit_aside()

    def _version_of(self, sequence: EngineSequence) -> int:
        """Return the weight version that samples a sequence's tokens and computes its KV."""
        own = sequence.adapter_version
        return self.version if own == PART_OF_WEIGHTS else own

    # ------------------------------------------------------------ requests, continued

    def score(self, message: ScoreTokens) -> None:
        """Queue a scoring request; it is ranked among the sequences.

        Raises:
            tidegate.errors.ScoreRefused: it can never be answered as asked.
        """
        if message.adapter and message.adapter_version is not None:
            self._refuse_own_versions(ScoreRefused)
            self._put_aside((True, message.request_id), _Aside(message, self._arrivals))
            self._arrivals += 1
            return
        if not self._has_adapter(message.adapter):
            raise ScoreRefused(no_adapter(message.adapter, self.version, self._adapters))
        self.scores.submit(message, self._arrivals)
        self._arrivals += 1

    def cancel(self, handle: int) -> None:
        """End a sequence. Unknown handles are ignored, because the sequence may just have
        finished."""
        if self._preparing.pop(handle, None) is not None:
            self._ended.append(EndedTurn(handle, CANCELLED))
            return
        if (aside := self._aside.pop((False, handle), None)) is not None:
            adapter = self.adapters.key_of(*aside.adapter)
            self._ended.append(EndedTurn(handle, CANCELLED, adapter))
            self._admit_aside()
            return
        sequence = self._turns.get(handle)
        if sequence is not None:
            self._queues.remove(sequence)
            self._report_end(sequence, CANCELLED)

    def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Stop sequences as ``mode`` says; ``take_replies`` reports when the pause has taken
        effect."""
        self._clears_cache |= clear_cache
        if self._gate.pause(mode):
            self._abort_running()

    def resume(self) -> None:
        """Lift any pause, pending or in effect."""
        self._gate.resume()
        self._clears_cache = False
        self._replies.append(TurnsResumed())

    def request_swap(self, update: FinishWeightUpdate) -> None:
        """Request a swap to staged weights; ``swap_due`` reports when it can be done."""
        if self._gate.request_swap(update):
            self._abort_running()

    def cancel_swap(self) -> None:
        """Cancel the pending swap, because its weights are no longer staged.
        Harmless without one."""
        self._gate.end_swap()

    def forget_orchestrator(self) -> None:
        """Drop pauses, swaps, sessions and scores of a lost orchestrator; sequences continue."""
        is_held = self._gate.is_held
        self._gate = PauseGate()
        self._gate.is_held = is_held
        self._clears_cache = False
        self._replies.clear()
        self._aside = {key: aside for key, aside in self._aside.items() if not key[0]}
        self.scores.clear()
        self.sessions.forget()
        self.adapters.forget_orchestrator()
        self._admit_aside()

    def hold(self, is_held: bool) -> None:
        """Stop or allow all steps, regardless of pauses; used while memory is asleep."""
        self._gate.is_held = is_held

    def forget_kv(self) -> None:
        """Preempt all running sequences and empty the prefix cache, because the KV memory is
        gone."""
        self._batch = None
        for sequence in self._queues.remove_running():
            self._queues.queue(sequence)
        self._prefixes.forget([], self.version)
        if self._speculation is not None:
            self._speculation.forget_kv()

    # ------------------------------------------------------------ steps and swaps

    def swap_due(self) -> FinishWeightUpdate | None:
        """Return the swap to do now, before the next step; None if there is none."""
        return self._gate.swap_due(self.running_turns)

    def weights_swapped(self, update: FinishWeightUpdate, *, adapters: Collection[str] = ()) -> int:
        """Record a swap that the runner has done; return how many sequences must recompute KV.

        Sequences whose adapter is not among the new ``adapters`` are refused.
        """
        recomputed = 0
        self._adapters = frozenset(adapters)
        self._replies += self.scores.refuse_without(self._adapters, update.version)
        self.scores.restart()
        for sequence in [
            sequence
            for sequence in self._turns.values()
            if sequence.adapter_version == PART_OF_WEIGHTS
            and not self._has_adapter(sequence.adapter)
        ]:
            self._refuse(
                sequence, f"weights v{update.version} have no adapter {sequence.adapter!r}"
            )
        for sequence in self._queues.running:
            if sequence.adapter_version != PART_OF_WEIGHTS:
                # Its tags count the adapter's versions, which do not distinguish KV of other base
                # weights.
                recomputed += self._queues.recompute(sequence, PART_OF_WEIGHTS)
                continue
            sequence.history.swap(self.version, sequence.computed)
            if update.kv_policy == "recompute":
                recomputed += self._queues.recompute(sequence, update.version)
        self.version = update.version
        # Even if the version is the same: a restarted orchestrator may reuse a number.
        self._prefixes.forget(self._queues.running, self.version)
        self._gate.end_swap()
        return recomputed

    def take_replies(self) -> list[Message]:
        """Return the due replies to pauses, resumes and prepared turns, each once."""
        if self._preparing:
            self._admit_prepared()
        paused = self._gate.take_effective(self.running_turns)
        if paused and self._clears_cache:
            self._clears_cache = False
            self._prefixes.forget(self._queues.running, self.version)
        replies = [*self._replies, *paused]
        self._replies.clear()
        return replies

    def take_ended(self) -> StepColumns | None:
        """Return sequences that were aborted or cancelled between steps, as rows without tokens."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, []
        return ended_columns(ended, self.version)

    @property
    def has_ended(self) -> bool:
        """Whether ``take_ended`` would return rows."""
        return bool(self._ended)

    def plan(self) -> Sequence[Row]:
        """Choose the rows of the next step; empty if nothing may run.

        Every non-empty plan must be followed by ``complete``, ``fail`` or ``refuse_planned``.
        """
        before, self._planned = self._planned, []
        if not self._gate.turns_run:
            self._batch = None
            return []
        self._planned = self._planner.plan(
            self._budget.tokens, self.version, may_start=self._gate.turns_start
        )
        if self._planner.drafted:
            self._batch = None
            return [row for rows in self.planned_rows() for row in rows]
        if self._planned != before or self._planner.decodes != len(before):
            self._batch = None
        elif self._batch is None and before and all(map(can_decode_plainly, before)):
            self._batch = DecodeBatch(before)
        if self._batch is not None:
            return self._batch.rows
        return [sequence.next_row() for sequence in self._planned]

    def step_took(self, seconds: float) -> None:
        """Record what the step that was planned last has taken, from its plan to its messages."""
        decodes = self._planner.decodes
        if self._speculation is not None and decodes == len(self._planned):
            self._speculation.step_took(decodes, self._planner.drafted, seconds)

    def complete(self, output: StepOutput) -> StepColumns | None:
        """Apply a step's output to the planned sequences; None if the step sampled nothing."""
        self._budget.succeed()
        failures = failures_of(output, self.version)
        is_plain = not failures and not output.attachments and not output.positions
        if self._batch is not None and not failures and not output.positions:
            return self._complete_batch(self._batch, output)
        self._batch = None
        sampled: list[int] = output.token_ids.tolist()
        rows = base_rows = SampledRows()
        groups: dict[AdapterVersion, SampledRows] = {}
        has_own_versions = self.adapters.in_use > 0
        scores = iter(output.scores)
        index = 0
        for sequence in self._planned:
            sequence.computed += sequence.chunk_tokens
            if sequence.computed >= sequence.share_at:
                self._prefixes.share(sequence, sequence.computed)
            if sequence.is_score:
                version = self._version_of(sequence)
                self._replies += self.scores.take(sequence, scores, version)
                continue
            if sequence.computed < sequence.length:
                continue
            if has_own_versions:
                rows = base_rows
                if (adapter := sequence.own_version) is not None:
                    rows = groups.setdefault(adapter, SampledRows())
            if not failures and not sequence.drafted and not sequence.is_prefilling:  # most rows
                finish = rows.add_next(sequence, index, sampled[index])
                if not is_plain:
                    self._add_attachments(sequence, rows, range(index, index + 1), output)
                if finish != RUNNING:
                    self._finish(sequence, is_whole=True)
                index += 1
            else:
                index = self._accept_samples(sequence, rows, index, output, failures)
        if index != len(sampled):
            raise AssertionError(f"{len(sampled)} tokens sampled for {index} rows")
        columns = [base_rows.columns(output, self.version)] if base_rows.handles else []
        for (name, version), own_rows in groups.items():
            if own_rows.handles:
                columns.append(own_rows.columns(output, version, name))
        return join_columns(columns) if columns else None

    def _complete_batch(self, batch: DecodeBatch, output: StepOutput) -> StepColumns:
        columns, ended = batch.complete(output, self.version, self._prefixes)
        for sequence in ended:
            self._finish(sequence, is_whole=True)
        return columns

    def fail(self, tokens: int) -> bool:
        """Preempt all sequences after an out-of-memory step; False if it cannot be smaller.

        Later steps have half the tokens for a while. Sequences outside the failed step are
        preempted too, because they may share blocks that it should have computed.
        """
        self.forget_kv()
        return self._budget.fail(tokens)

    def planned_rows(self) -> list[list[Row]]:
        """Return the planned step's rows, one list per sequence, in the order of the plan."""
        return [[sequence.next_row(), *sequence.draft_rows()] for sequence in self._planned]

    def probe_row(self) -> Row:
        """Return a row of one token that belongs to no sequence, to test whether the model works at
        all."""
        sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
        samples = sampling if self.scores.generates else None
        return Row(np.zeros(1, np.int32), 0, [0], samples)

    def refuse_planned(self, failed: Mapping[int, str]) -> None:
        """Refuse planned sequences; ``failed`` maps indices in the plan to reasons.

        The step is planned anew, and the other sequences are preempted, because they may share KV
        with the refused ones.
        """
        for index, reason in failed.items():
            sequence = self._planned[index]
            if sequence.is_score:
                self.scores.cancel(sequence.handle)
                self._reply_score_failed(sequence.handle, reason)
            else:
                self._refuse(sequence, reason)
        self._planned = []
        self.forget_kv()

    # ------------------------------------------------------------ state

    @property
    def planned_draft_tokens(self) -> int:
        """Number of draft tokens of the step that was planned last."""
        return self._planner.drafted

    @property
    def step_tokens_max(self) -> int:
        """Token budget of the next step."""
        return self._budget.tokens

    @property
    def handles(self) -> list[int]:
        """Handles of all sequences, including ended ones that have not been reported yet."""
        ended = (ended.handle for ended in self._ended)
        aside = (number for is_score, number in self._aside if not is_score)
        return [*self._turns, *self._preparing, *aside, *ended]

    @property
    def running_turns(self) -> int:
        """Number of sequences in the running set, frozen or not."""
        return len(self._queues.running)

    @property
    def waiting_turns(self) -> int:
        """Number of sequences outside the running set; they hold no KV blocks."""
        return self._queues.waiting_turns + len(self._preparing) + len(self._aside)

    @property
    def is_preparing(self) -> bool:
        """Whether a grammar is being compiled; the engine must poll, because nothing wakes it."""
        return bool(self._preparing)

    @property
    def is_pause_requested(self) -> bool:
        """Whether a pause is pending or in effect."""
        return self._gate.is_pause_requested

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether a pause is in effect and no sequence runs."""
        return self._gate.is_pause_in_effect(self.running_turns)

    @property
    def is_swap_requested(self) -> bool:
        """Whether a swap to staged weights is pending."""
        return self._gate.is_swap_requested

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that no sequence holds."""
        return self._queues.free_blocks

    @property
    def can_step(self) -> bool:
        """Whether ``plan`` may return rows."""
        if self._queues.running:
            return self._gate.turns_run
        return self._queues.waiting_turns > 0 and self._gate.turns_start

    # ------------------------------------------------------------ completion of a step

    def _accept_samples(
        self,
        sequence: EngineSequence,
        rows: SampledRows,
        index: int,
        output: StepOutput,
        failures: Mapping[int, str],
    ) -> int:
        """Add the samples from ``index`` on to a sequence; return the next sequence's first
        index."""
        end = index + 1 + sequence.drafted
        if index in failures:
            self._refuse(sequence, failures[index])
            return end
        first_failure = next((i for i in range(index, end) if i in failures), end)
        accepted = rows.add(
            sequence,
            index,
            output.token_ids[index:first_failure].tolist(),
            self._version_of(sequence),
        )
        self._add_attachments(sequence, rows, range(index, index + accepted.tokens), output)
        self._record_accepted(sequence, accepted, end - index - 1)
        return end

    @staticmethod
    def _add_attachments(
        sequence: EngineSequence, rows: SampledRows, accepted: range, output: StepOutput
    ) -> None:
        """Add the attachments of the ``accepted`` sampling rows of one sequence."""
        if accepted.start in output.attachments:
            rows.add_attachments(sequence, [output.attachments[index] for index in accepted])
        if output.positions:
            rows.add_positions(sequence, output.positions, accepted)

    def _record_accepted(
        self, sequence: EngineSequence, accepted: AcceptedTokens, drafted: int
    ) -> None:
        """Cache the accepted tokens' blocks, update the draft length, and finish the sequence if
        complete."""
        if drafted:
            self._prefixes.share(sequence, sequence.computed)
            if self._speculation is not None:
                self._speculation.record(sequence, drafted, accepted.tokens - 1)
        if accepted.finish != RUNNING:
            self._finish(sequence, is_whole=True)

    def _has_adapter(self, adapter: str) -> bool:
        return not adapter or adapter in self._adapters

    # ------------------------------------------------------------ ends of sequences

    def _finish(self, sequence: EngineSequence, *, is_whole: bool = False) -> None:
        """Remove and forget a sequence; ``is_whole`` says that it finished by itself."""
        self._queues.remove(sequence)
        self._forget(sequence, is_whole=is_whole)

    def _forget(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        del self._turns[sequence.handle]
        self._release_adapter(sequence)
        if self._speculation is not None:
            self._speculation.ended(sequence, is_whole=is_whole)

    def _refuse(self, sequence: EngineSequence, reason: str) -> None:
        """End a sequence that cannot be sampled, and queue its refusal; its tokens of this
        step are dropped."""
        self._finish(sequence)
        self._reply_turn_failed(sequence.handle, reason)

    def _report_end(self, sequence: EngineSequence, finish: int) -> None:
        ended = EndedTurn(sequence.handle, finish, sequence.own_version)
        self._forget(sequence, is_whole=False)
        self._ended.append(ended)

    def _abort_running(self) -> None:
        for sequence in self._queues.remove_running():
            if sequence.is_score:
                self._queues.queue(sequence)
            else:
                self._report_end(sequence, ABORT)

    # ------------------------------------------------------------ for tests

    def check(self) -> None:
        """Raise AssertionError unless sequences and blocks agree, and none is written twice."""
        self._queues.check()
