"""Recorded routed experts: audits replay them, and report those that no tagged version chose."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.observability.sampled_runs import Sampler, edit_rollout, make_models, record_run
from tidegate.engine.execution.block_cache import cache_argument
from tidegate.observability.audit.audit import TOLERANCE, AuditReport, audit_run
from tidegate.observability.audit.replay import route_errors
from tidegate.policies.routing_replay import record_routed_experts, replay_routed_experts
from tidegate.transport.attachments import Attachment

LAYERS, EXPERTS, PER_TOKEN = 2, 4, 2
MIXTURE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": 24,
}
NEAR_NATS = 0.3
"""Below the tolerance of engines in bfloat16, 0.4."""


class RoutedSampler(Sampler):
    """Records the experts of each position, and reports them as engines do."""

    def __init__(self, models: list[Any], rollout_id: int, *, disagrees: bool = False) -> None:
        """With ``disagrees``, the last layer's router chooses the runner-up where it is near."""
        super().__init__(models, rollout_id, [2, 3, 4, 5 + rollout_id % 4])
        self.disagrees = disagrees
        self.swapped = 0
        self.experts: list[np.ndarray[Any, Any]] = []
        self.reported = 0

    def forget(self) -> None:
        super().forget()
        self.experts, self.reported = [], 0

    def tokens(self, count: int, version: int, engine: str = "engine-0") -> None:
        for _ in range(count):
            super().tokens(1, version, engine)
            news = np.stack(self.experts[self.reported :]).astype(np.uint8)
            attachments = self.rollout.turns[-1].attachments
            assert attachments is not None
            shape = [LAYERS, PER_TOKEN]
            made = Attachment(0, "routed_experts", self.reported, "uint8", news.tobytes(), shape)
            attachments.append(made, tokens_before=0)
            self.reported = len(self.experts)

    def _read_one(self, version: int) -> torch.Tensor:
        model = self.models[version]
        ids = self._choice(model)
        with replay_routed_experts(model, ids[None]):
            logits = super()._read_one(version)
        self.experts.append(ids[0].numpy())
        return logits

    def _choice(self, model: Any) -> torch.Tensor:
        """Return the experts [1, L, k] of the next position."""
        token = torch.tensor([[self.rollout.token_ids[len(self.history)]]])

        def read() -> None:
            cache = copy.deepcopy(self.cache)
            with torch.no_grad():
                model(input_ids=token, use_cache=True, **cache_argument(model, cache))

        with record_routed_experts(model) as recorder:
            read()
        ids = recorder.routed_experts()
        if self.disagrees:
            scores: dict[int, torch.Tensor] = {}
            with replay_routed_experts(
                model, ids[None], on_choice=lambda layer, row, _: scores.update({layer: row})
            ):
                read()
            changed = ids.clone()
            changed[0, -1, -1] = scores[LAYERS - 1].argsort(descending=True)[0, PER_TOKEN]
            if route_errors(scores[LAYERS - 1], changed[:, -1])[0] < NEAR_NATS:
                self.swapped += 1
                return changed
        return ids


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return make_models(model_type="qwen3_moe", **MIXTURE)


def rollouts(models: list[Any], **options: bool) -> list[RoutedSampler]:
    """Return two turns of one version, an abort, a recompute, and KV kept over a new version."""
    two_turns, aborted, recomputed, kept = (RoutedSampler(models, n, **options) for n in range(4))
    two_turns.turn(routed_experts=True)
    two_turns.tokens(5, 1)
    two_turns.rollout.extend([7, 8, 9])
    two_turns.turn(routed_experts=True)
    two_turns.forget()
    two_turns.tokens(6, 2)
    for sampler, engine in ((aborted, "engine-1"), (recomputed, "engine-0")):
        sampler.turn(routed_experts=True)
        sampler.tokens(4, 0)
        sampler.forget()
        sampler.tokens(7, 1, engine)
        sampler.forget()
        sampler.tokens(2, 2, engine)
    kept.turn(routed_experts=True)
    kept.tokens(6, 0)
    kept.tokens(6, 1)
    return [two_turns, aborted, recomputed, kept]


@pytest.fixture(scope="module")
def samplers(models: list[Any]) -> list[RoutedSampler]:
    """Rollouts of engines that compute as the replay does. Tests only read them; what one changes
    is its own recording."""
    return rollouts(models)


def recorded(path: Path, models: list[Any], samplers: list[RoutedSampler], dtype: str) -> Path:
    made = [sampler.rollout for sampler in samplers]
    return record_run(path, models, made, dtype=dtype)


def route_problems(report: AuditReport) -> list[str]:
    return [str(each) for each in report.problems if "routed experts" in str(each)]


def test_routes_of_every_pass_are_those_of_its_own_weights(
    models: list[Any], samplers: list[RoutedSampler], tmp_path: Path
) -> None:
    report = audit_run(recorded(tmp_path / "run", models, samplers, "float32"))
    assert [str(problem) for problem in report.problems] == []
    assert report.tokens_agreeing == report.tokens
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE / 10


def change_position(row: dict[str, Any], report: int, position: int, ids: list[int]) -> None:
    """Change the last layer's experts of a position in one report of a row's first turn."""
    entry = row["turns"][0]["routed_experts"][report]
    values = np.frombuffer(entry["values"], entry["dtype"]).reshape(entry["shape"]).copy()
    values[position, -1] = ids
    entry["values"] = values.tobytes()


@pytest.mark.parametrize(("rollout_id", "report"), [(0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("position", [0, 4])
def test_a_wrong_expert_of_one_position_is_reported(
    models: list[Any],
    samplers: list[RoutedSampler],
    tmp_path: Path,
    rollout_id: int,
    report: int,
    position: int,
) -> None:
    run = recorded(tmp_path / "run", models, samplers, "float32")
    attachments = samplers[rollout_id].rollout.turns[0].attachments
    assert attachments is not None
    reports = list(attachments.reports("routed_experts"))
    if report >= len(reports):
        pytest.skip("this version chose as the one before")
    own = set(reports[report].entries[position, -1].tolist())
    others = [expert for expert in range(EXPERTS) if expert not in own]

    edit_rollout(run, rollout_id, lambda row: change_position(row, report, position, others))

    problems = route_problems(audit_run(run))
    assert problems
    assert all(p.startswith(f"rollout {rollout_id}, turn 0: the recorded routed") for p in problems)
    assert any(f"first position {position}, computed by v" in problem for problem in problems)


def test_routes_of_another_version_are_reported(
    models: list[Any], samplers: list[RoutedSampler], tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", models, samplers, "float32")
    context = torch.tensor([samplers[0].rollout.token_ids[: 4 + 5 - 1].tolist()])
    with torch.no_grad(), record_routed_experts(models[2]) as recorder:
        models[2](input_ids=context)
    others = recorder.routed_experts().numpy().astype(np.uint8)
    attachments = samplers[0].rollout.turns[0].attachments
    assert attachments is not None
    assert (others != next(attachments.reports("routed_experts")).entries).any()

    def replace(row: dict[str, Any]) -> None:
        row["turns"][0]["routed_experts"][0]["values"] = others.tobytes()

    edit_rollout(run, 0, replace)
    assert route_problems(audit_run(run))


def test_experts_that_no_router_can_choose_are_reported(
    models: list[Any], samplers: list[RoutedSampler], tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", models, samplers, "bfloat16")
    edit_rollout(run, 0, lambda row: change_position(row, 0, 2, [3, 3]))
    edit_rollout(run, 3, lambda row: change_position(row, 0, 1, [0, EXPERTS]))
    problems = route_problems(audit_run(run))
    assert len(problems) == 2
    assert all("off by inf nats" in problem for problem in problems)


def test_routers_that_disagree_on_near_experts_do_not_disturb_the_log_probs(
    models: list[Any], tmp_path: Path
) -> None:
    samplers = rollouts(models, disagrees=True)
    assert sum(sampler.swapped for sampler in samplers) > 3
    run = recorded(tmp_path / "run", models, samplers, "bfloat16")

    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE


def strip_routes(run: Path) -> None:
    def strip(row: dict[str, Any]) -> None:
        for turn in row["turns"]:
            turn["routed_experts"] = None

    for number in range(4):
        edit_rollout(run, number, strip)


SMALL_TOLERANCE = 0.01
"""Less than one expert changes in these models, as .4 is in larger ones."""


def test_tokens_of_a_rounded_mixture_without_routes_are_counted_apart(
    models: list[Any], tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", models, rollouts(models, disagrees=True), "bfloat16")
    strip_routes(run)

    report = audit_run(run, tolerance=SMALL_TOLERANCE)
    assert report.agrees, report.lines()
    assert report.tokens_unrouted > 0
    assert report.tokens_agreeing + report.tokens_unrouted == report.tokens
    assert any("record them with routed_experts=True" in line for line in report.lines())


def test_wrong_weights_of_a_rounded_mixture_without_routes_are_detected(
    samplers: list[RoutedSampler], tmp_path: Path
) -> None:
    others = make_models(versions=3, drift=0.5, model_type="qwen3_moe", **MIXTURE)
    run = recorded(tmp_path / "run", list(reversed(others)), samplers, "bfloat16")
    strip_routes(run)
    problems = [str(problem) for problem in audit_run(run).problems]
    assert any("more than other experts explain" in problem for problem in problems)


def test_mismatches_of_a_mixture_in_float32_count_without_routes(
    models: list[Any], tmp_path: Path
) -> None:
    run = recorded(tmp_path / "run", models, rollouts(models, disagrees=True), "float32")
    strip_routes(run)
    report = audit_run(run, tolerance=SMALL_TOLERANCE)
    assert not report.agrees
    assert report.tokens_unrouted == 0
