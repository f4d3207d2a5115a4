"""Attachments that the scheduler reports: routed experts of all positions; sizes of messages."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.models.test_model_parity import load_peer, load_runner
from tests.models import make_model_directory
from tidegate.engine.drafts.lookup import LookupDrafts
from tidegate.engine.execution.fallback import FallbackRunner
from tidegate.engine.execution.runner import Runner
from tidegate.engine.models.fallback_weights import load_fallback
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.scheduling import step_columns
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.scheduling.step_columns import StepColumns, split_attachments
from tidegate.errors import TurnRefused
from tidegate.orchestrator.core.token_attachments import TurnAttachments
from tidegate.policies.routing_replay import record_routed_experts
from tidegate.transport.attachments import Attachment
from tidegate.transport.messages import FinishWeightUpdate, SamplingParams, SubmitTurn

BLOCK_TOKENS = 8
HIDDEN_SIZE = 64
SAMPLING = SamplingParams(max_tokens=14, routed_experts=True)


class Engine:
    """A scheduler over a real mixture; collects what it reports of each turn."""

    def __init__(self, path: Path, *, num_blocks: int = 64, drafts: bool = False) -> None:
        self.runner: Runner = load_runner(path)
        limits = EngineLimits(
            max_running_turns=8,
            max_step_tokens=24,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            context_tokens_max=256,
            vocab_size=96,
        )
        options = OptionReader(vocab_size=96, max_running_turns=8, hidden_size=HIDDEN_SIZE)
        self.scheduler = EngineScheduler(
            limits, options=options, drafts=LookupDrafts() if drafts else None
        )
        self.contexts: dict[int, list[int]] = {}
        self.attachments: dict[int, TurnAttachments] = {}
        self.steps = 0

    def submit(self, turn: int, prompt: list[int], sampling: SamplingParams = SAMPLING) -> None:
        ids = np.array(prompt, "<i4").tobytes()
        self.scheduler.submit(SubmitTurn(turn=turn, token_ids=ids, sampling=sampling))
        self.contexts[turn] = list(prompt)
        self.attachments[turn] = TurnAttachments(sampling)

    def run(self, between: Callable[[int], None] = lambda step: None) -> None:
        """Run until no turn is left; ``between`` is called after each step."""
        while rows := self.scheduler.plan():
            columns = self.scheduler.complete(self.runner.step(rows))
            if columns is not None:
                self.take(columns)
            self.steps += 1
            between(self.steps)

    def take(self, columns: StepColumns) -> None:
        for part in split_attachments(columns):
            for attachment in part.attachments:
                self.attachments[attachment.turn].append(attachment, tokens_before=0)
        handles = np.frombuffer(columns.turns, "<u4").tolist()
        counts = np.frombuffer(columns.counts, "<u4").tolist() or [1] * len(handles)
        tokens = iter(np.frombuffer(columns.token_ids, "<i4").tolist())
        for handle, count in zip(handles, counts, strict=True):
            self.contexts[handle] += [next(tokens) for _ in range(count)]

    def check(self, path: Path, turns: list[int]) -> None:
        """Compare the turns' routed experts with those of one forward pass of transformers."""
        peer = load_peer(path)
        for turn in turns:
            experts = self.attachments[turn].newest("routed_experts")
            assert experts is not None
            context = self.contexts[turn][:-1]  # the last token's KV was never needed
            with torch.no_grad(), record_routed_experts(peer) as recorder:
                peer(torch.tensor(context)[None])
            expected = np.sort(recorder.routed_experts().numpy(), -1)
            assert experts.shape == expected.shape
            # Two experts of nearly equal scores may change places by the order of a sum.
            assert (np.sort(experts, -1) == expected).all(-1).mean() > 0.99


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def prompts(turns: int, length: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    shared = generator.integers(1, 96, length - 3).tolist()
    return [[*shared, *generator.integers(1, 96, 3).tolist()] for _ in range(turns)]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_every_position_but_the_last_tokens_has_the_experts_that_computed_it(
    mixture: Path, drafts: bool
) -> None:
    engine = Engine(mixture, drafts=drafts)
    for turn, prompt in enumerate(prompts(6, 41)):
        engine.submit(turn, prompt)
    engine.run()
    engine.check(mixture, list(range(6)))
    assert all(
        len(list(each.reports("routed_experts"))) == 1 for each in engine.attachments.values()
    )


def test_preempted_turns_report_their_recomputed_positions_again(mixture: Path) -> None:
    engine = Engine(mixture, num_blocks=20)
    for turn, prompt in enumerate(prompts(6, 30)):
        engine.submit(turn, prompt)
    engine.run()
    engine.check(mixture, list(range(6)))


def test_a_turn_that_asks_does_not_reuse_blocks_whose_experts_were_not_recorded(
    mixture: Path,
) -> None:
    engine = Engine(mixture)
    first, second, third = prompts(3, 60)
    engine.submit(0, first, SamplingParams(max_tokens=4))
    engine.run()
    engine.submit(1, second)
    engine.run()
    engine.submit(2, third)
    steps = engine.steps
    engine.run()
    assert engine.steps - steps < 3 + SAMPLING.max_tokens  # its prefix is turn 1's
    engine.check(mixture, [1, 2])


def test_new_weights_with_recompute_report_the_prefix_again(mixture: Path) -> None:
    engine = Engine(mixture)
    engine.submit(0, prompts(1, 40)[0])

    def swap(step: int) -> None:
        if step == 6:
            update = FinishWeightUpdate(version=1, pause_mode="keep", kv_policy="recompute")
            assert engine.scheduler.weights_swapped(update) == 1

    engine.run(swap)
    engine.check(mixture, [0])
    # The same weights route alike, so the second report repeats the first.
    assert len(list(engine.attachments[0].reports("routed_experts"))) == 1


def runners(path: Path) -> list[Runner]:
    weights = load_fallback(path, torch.float32)
    return [load_runner(path), FallbackRunner(weights, num_blocks=64, block_tokens=BLOCK_TOKENS)]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("code", [0, 1], ids=["tidegate", "transformers"])
def test_each_token_has_the_hidden_state_it_was_sampled_from(
    mixture: Path, code: int, drafts: bool
) -> None:
    engine = Engine(mixture, drafts=drafts)
    engine.runner = runners(mixture)[code]
    asking = SamplingParams(max_tokens=9, hidden_states=True, top_logprobs=1)
    for turn, prompt in enumerate(prompts(5, 41)):
        engine.submit(turn, prompt, asking if turn != 2 else SamplingParams(max_tokens=9))
    engine.run()
    peer = load_peer(mixture)
    for turn in range(5):
        states = engine.attachments[turn].entries("hidden_states", 9)
        if turn == 2:
            assert states is None
            continue
        with torch.no_grad():
            context = torch.tensor(engine.contexts[turn])[None]
            expected = peer(context, output_hidden_states=True).hidden_states[-1][0, 40:-1]
        assert states is not None
        np.testing.assert_allclose(states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("max_tokens", "hidden_size", "reason"),
    [
        (5, 0, "model has no hidden states to report"),
        (
            20_000,
            1024,
            "81920000 bytes, and a turn may have 67108864; set max_tokens to at most 16",
        ),
    ],
)
def test_hidden_states_that_exceed_their_limit_are_refused_before_the_turn_runs(
    max_tokens: int, hidden_size: int, reason: str
) -> None:
    reader = OptionReader(vocab_size=9, max_running_turns=2, hidden_size=hidden_size)
    ids = np.array([1], "<i4").tobytes()
    asking = SamplingParams(max_tokens=max_tokens, hidden_states=True)
    with pytest.raises(TurnRefused, match=reason):
        reader.read(SubmitTurn(turn=0, token_ids=ids, sampling=asking), np.empty(9, np.int32))


def test_a_model_without_a_mixture_refuses_with_the_reason() -> None:
    reader = OptionReader(
        vocab_size=9, max_running_turns=2, refused_options={"routed_experts": "it has no mixture"}
    )
    ids = np.array([1], "<i4").tobytes()
    with pytest.raises(TurnRefused, match="it has no mixture"):
        reader.read(SubmitTurn(turn=0, token_ids=ids, sampling=SAMPLING), np.empty(9, np.int32))


def experts(turn: int, start: int, positions: int) -> Attachment:
    values = np.arange(positions * 6, dtype="<u2").tobytes()
    return Attachment(turn, "routed_experts", start, "uint16", values, [3, 2])


def test_attachments_that_exceed_a_message_go_ahead_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_columns, "ATTACHMENT_BYTES_MAX", 120)  # 10 positions of 12 bytes
    kept = Attachment(5, "kept_ids", 0, "int32", bytes(80), counts=b"\x14\0\0\0")
    columns = StepColumns(
        version=3,
        turns=np.array([4, 5], "<u4").tobytes(),
        token_ids=bytes(8),
        logprobs=bytes(8),
        attachments=[experts(4, 0, 25), kept, experts(5, 7, 3)],
    )
    *ahead, last = split_attachments(columns)

    assert (last.token_ids, last.turns) == (columns.token_ids, columns.turns)
    for part in ahead:
        assert (part.token_ids, part.logprobs, part.finish, part.version) == (b"", b"", b"", 3)
        assert np.frombuffer(part.counts, "<u4").tolist() == [0] * (len(part.turns) // 4)
    parts = [each for part in [*ahead, last] for each in part.attachments]
    assert [(each.turn, each.name, each.start, each.length) for each in parts] == [
        (4, "routed_experts", 0, 10),
        (4, "routed_experts", 10, 10),
        (4, "routed_experts", 20, 5),
        (5, "kept_ids", 0, 1),
        (5, "routed_experts", 7, 3),
    ]
    for part in [*ahead, last]:
        assert sum(len(each.values) for each in part.attachments) <= 120
        handles = np.frombuffer(part.turns, "<u4").tolist()
        assert all(each.turn in handles for each in part.attachments)
    joined = TurnAttachments(SAMPLING)
    for each in parts[:3]:
        joined.append(each, tokens_before=0)
    [report] = joined.reports("routed_experts")
    assert report.entries.tobytes() == columns.attachments[0].values


def test_a_step_without_large_attachments_is_one_message() -> None:
    columns = StepColumns(version=0, turns=bytes(4), attachments=[experts(0, 0, 2)])
    assert split_attachments(columns) == [columns]
