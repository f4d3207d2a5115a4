"""The audit: passes correct records, and reports each kind of falsified record."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.observability import recorded, sampled_runs
from tests.observability.sampled_runs import (
    KINDS,
    Row,
    claim_a_recompute,
    edit_rollout,
    make_models,
    move_boundary,
    record_run,
    tag,
    tag_all,
)
from tidegate.errors import AuditError
from tidegate.observability.audit.audit import TOLERANCE, AuditReport, audit_run
from tidegate.observability.audit.replay import kept_set_error, sampled_logprobs
from tidegate.observability.records.recording import read_trajectories
from tidegate.observability.records.weight_archive import weights_path
from tidegate.transport.sampling import LogitsProcessor

pytestmark = pytest.mark.wire

ONE_VERSION, ABORTED, RECOMPUTED, KEPT, KEPT_OVER_TURNS, SWAPPED_IN_PREFILL, FILTERED = range(7)


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = make_models()
    rollouts = [sampled_runs.one_version(models, ONE_VERSION, version=1, tokens=5)]
    rollouts += [kind(models, number) for number, kind in enumerate(KINDS, start=1)]
    rollouts += [
        sampled_runs.one_version(models, number, version=number % 3, tokens=number - 5)
        for number in range(7, 13)
    ]
    return record_run(tmp_path_factory.mktemp("runs") / "honest", models, rollouts)


@pytest.fixture
def run(honest_run: Path, tmp_path: Path) -> Path:
    """A copy of the correct run, to be falsified."""
    return shutil.copytree(honest_run, tmp_path / "run")


@pytest.fixture(scope="module")
def honest_options_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = make_models()
    rollouts = [sampled_runs.with_options(models, number) for number in range(3)]
    return record_run(tmp_path_factory.mktemp("runs") / "options", models, rollouts)


@pytest.fixture
def options_run(honest_options_run: Path, tmp_path: Path) -> Path:
    """A copy of a run with all sampling options, to be falsified."""
    return shutil.copytree(honest_options_run, tmp_path / "run")


@pytest.fixture(scope="module")
def honest_booked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.record_run(tmp_path_factory.mktemp("booked") / "run")


@pytest.fixture
def booked_run(honest_booked_run: Path, tmp_path: Path) -> Path:
    """A copy of a real run, with metrics.jsonl, to be falsified."""
    return shutil.copytree(honest_booked_run, tmp_path / "run")


def messages(report: AuditReport) -> list[tuple[int, int, str]]:
    """Return the problems of single turns; those of a row's columns follow from them."""
    return [(p.rollout_id, p.turn, p.message) for p in report.problems if p.turn >= 0]


def of_rows(report: AuditReport) -> list[tuple[int, str]]:
    """Return the problems of whole rows and batches."""
    return [(p.rollout_id, p.message) for p in report.problems if p.turn < 0]


def test_audits_agree_for_every_sampling_mode_across_weight_updates(honest_run: Path) -> None:
    report = audit_run(honest_run)

    assert messages(report) == []
    assert report.agrees
    sampled = sum(turn.length for r in read_trajectories(honest_run) for turn in r.turns)
    assert report.tokens == report.tokens_agreeing == sampled
    assert report.tokens_unknown == 0
    assert report.versions == 3
    assert (
        report.spans_mixed == 2 + 2 + 1
    )  # two of kept(), two of kept_over_turns(), one of swapped_in_prefill()
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE / 10


def test_every_sampling_option_is_audited_except_user_defined_processors(
    honest_options_run: Path,
) -> None:
    report = audit_run(honest_options_run)

    assert messages(report) == []
    assert report.agrees
    assert report.tokens_unreplayable == 3 * 6
    assert report.tokens_agreeing == report.tokens - 3 * 6 == 3 * 7 * 6
    assert any(
        "18 tokens were not replayed: they were drawn with" in line for line in report.lines()
    )
    assert report.worst is not None
    assert report.worst.difference < TOLERANCE / 10

    unreplayed = dataclasses.replace(
        report, tokens_agreeing=0, tokens_unreplayable=report.tokens, worst=None
    )
    assert unreplayed.lines()[-1] == (
        f"nothing replayed: none of {report.tokens} tokens could be checked"
    )


def test_an_option_that_was_not_applied_is_detected(options_run: Path) -> None:
    def forget(row: Row) -> None:
        for turn in row["turns"][:7]:
            turn["options"] = None

    for rollout_id in range(3):
        edit_rollout(options_run, rollout_id, forget)
    assert {problem.turn for problem in audit_run(options_run).problems} == {*range(7)}


def test_options_that_are_not_json_can_not_be_audited(options_run: Path) -> None:
    edit_rollout(options_run, 0, lambda row: row["turns"][0].update(options="{"))
    with pytest.raises(AuditError, match="recorded sampling options are no JSON"):
        audit_run(options_run)


def test_the_audit_reports_the_share_of_undetectable_wrong_tags(honest_run: Path) -> None:
    report = audit_run(honest_run)
    for power in (report.version_power, report.boundary_power, report.kv_power):
        assert power.tags_tried > 0
        assert power.tags_unnoticed == 0
    assert report.version_power.tags_tried > report.spans
    assert not audit_run(honest_run, tolerance=0).agrees


def call_the_prefix_fresh(row: Row) -> None:
    turn = row["turns"][0]
    tag(turn, 0, 1)
    turn["prefills"][0]["spans"] = [{"version": 1, "start": 0, "end": 6}]


def change_a_token(row: Row) -> None:
    position = row["turns"][1]["start"] + 2
    row["token_ids"][position] = (row["token_ids"][position] + 1) % sampled_runs.VOCAB


def change_an_observation(row: Row) -> None:
    row["token_ids"][row["turns"][1]["start"] - 1] = 20


NO_MATCH = "do not match its weights"


@pytest.mark.parametrize(
    ("rollout_id", "lie", "found"),
    [
        (ONE_VERSION, partial(tag_all, version=2), {(0, NO_MATCH), (1, NO_MATCH)}),
        (ABORTED, lambda row: tag(row["turns"][0], 1, 2), {(0, "is tagged v2, but v1 computed")}),
        (KEPT, lambda row: tag(row["turns"][0], 1, 1), {(0, "v1 say fresh, but the KV was mixed")}),
        (KEPT, claim_a_recompute, {(0, NO_MATCH)}),
        (KEPT, partial(move_boundary, shift=-1), {(0, NO_MATCH)}),
        (KEPT, partial(move_boundary, shift=1), {(0, NO_MATCH)}),
        (SWAPPED_IN_PREFILL, call_the_prefix_fresh, {(0, NO_MATCH)}),
        (RECOMPUTED, partial(move_boundary, shift=1, span=1), {(0, "reaches across token 4")}),
        (ONE_VERSION, change_a_token, {(1, "first token 2:")}),
        (ONE_VERSION, change_an_observation, {(1, NO_MATCH)}),
        (FILTERED, lambda row: row["turns"][2].update(top_k=6), {(2, NO_MATCH)}),
    ],
)
def test_a_wrong_tag_token_or_parameter_is_detected_in_its_turn(
    run: Path, rollout_id: int, lie: Callable[[Row], None], found: set[tuple[int, str]]
) -> None:
    edit_rollout(run, rollout_id, lie)
    report = audit_run(run)
    assert not report.agrees
    assert {(r, t) for r, t, _ in messages(report)} == {(rollout_id, t) for t, _ in found}
    for turn, part in found:
        assert any(t == turn and part in message for _, t, message in messages(report))


def test_a_version_that_was_never_archived_is_a_wrong_tag(run: Path) -> None:
    edit_rollout(run, ONE_VERSION, partial(tag_all, version=99))
    report = audit_run(run)
    assert messages(report) == [
        (ONE_VERSION, turn, "tokens from 0 on need weights v99, which are not in the archive")
        for turn in (0, 1)
    ]
    assert report.tokens_agreeing == report.tokens - 12


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda turn: turn["spans"][0].update(end=4), "its spans cover 4 tokens but 5"),
        (lambda turn: turn["spans"][0].update(start=1), "gap or overlap at token 0"),
        (lambda turn: turn["prefills"][0].update(at=1), "does not name the version of each"),
        (lambda turn: turn.update(prefills=[]), "no prefill names its versions"),
        (lambda turn: turn.update(start=1000), "are not in the context"),
        (lambda turn: turn.update(length=0, spans=[], prefills=[]), "are in no turn"),
    ],
)
def test_tables_that_do_not_cover_every_sampled_token_are_detected(
    run: Path, lie: Callable[[Row], None], message: str
) -> None:
    edit_rollout(run, ONE_VERSION, lambda row: lie(row["turns"][0]))
    report = audit_run(run)
    assert any(message in m for _, _, m in messages(report))
    assert not report.agrees


def test_tokens_of_unknown_history_are_counted_separately(run: Path) -> None:
    def admit(row: Row) -> None:
        row["turns"][0]["prefills"] = []
        row["turns"][0]["spans"][0] |= {"kv_oldest": None, "kv_newest": None}

    edit_rollout(run, ONE_VERSION, admit)
    report = audit_run(run)
    assert report.agrees
    assert report.tokens_unknown == 5
    assert report.tokens_agreeing == report.tokens - 5


def test_a_token_outside_the_vocabulary_is_named(run: Path) -> None:
    lies = [(ONE_VERSION, 0, -1), (ABORTED, 3, sampled_runs.VOCAB), (KEPT, -1, 2**31 - 1)]
    for rollout_id, position, token_id in lies:

        def lie(row: Row, position: int = position, token_id: int = token_id) -> None:
            row["token_ids"][position] = token_id

        edit_rollout(run, rollout_id, lie)
    report = audit_run(run)
    assert not report.agrees
    for (rollout_id, _, token_id), (found, message) in zip(lies, of_rows(report), strict=True):
        assert rollout_id == found
        assert f"has the id {token_id}, and the model's vocabulary has 40 tokens" in message
    assert report.tokens_agreeing == report.tokens - 12 - 9 - 10


def test_biases_and_kept_tokens_outside_the_vocabulary_are_named(options_run: Path) -> None:
    def bias(row: Row) -> None:
        options = json.loads(row["turns"][2]["options"])
        options["logit_bias"] = [[400, 3.0]]
        row["turns"][2]["options"] = json.dumps(options)

    def allow(row: Row) -> None:
        options = json.loads(row["turns"][4]["options"])
        allowed = LogitsProcessor("allowed_tokens", {"token_ids": [5, -3]})
        options["logits_processors"] = [allowed.to_str()]
        row["turns"][4]["options"] = json.dumps(options)

    def keep(row: Row) -> None:
        row["turns"][0]["kept_ids"] = [[1, 400]] * row["turns"][0]["length"]

    def keep_fewer(row: Row) -> None:
        row["turns"][0]["kept_ids"] = [[1]]

    edit_rollout(options_run, 0, bias)
    edit_rollout(options_run, 0, allow)
    edit_rollout(options_run, 1, keep)
    edit_rollout(options_run, 2, keep_fewer)
    says = [(r, t, m.split(",")[0]) for r, t, m in messages(audit_run(options_run))]
    assert says == [
        (0, 2, "logit bias 0 has the id 400"),
        (0, 4, "token of allowed_tokens 1 has the id -3"),
        (1, 0, "kept token 1 has the id 400"),
        (2, 0, "it has 1 kept sets for 6 tokens"),
    ]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"staleness": 0}, "staleness=0, but its oldest trained token is of v0"),
        ({"staleness": None}, "staleness=None, but its oldest trained token is of v0"),
        (
            {"consumed_version": 1, "staleness": 1},
            "consumed_version=1 follows a row with 2",
        ),
        ({"consumed_version": None, "staleness": None}, "its consumed_version is missing"),
        ({"advantage": None}, "its advantage is missing"),
        ({"discard_reason": "stale"}, "with discard_reason='stale'"),
        (
            {"state": "discarded", "discard_reason": "stale"},
            "its state is 'discarded', but it has consumed_version=2",
        ),
        ({"state": "evaluated"}, "its state is 'evaluated', but it has staleness=2"),
        ({"state": "running"}, "its state is 'running', which no row that has ended can have"),
    ],
)
def test_a_bookkeeping_column_that_contradicts_the_provenance_is_named(
    run: Path, edit: Row, says: str
) -> None:
    edit_rollout(run, ABORTED, lambda row: row.update(edit))
    report = audit_run(run)
    assert not report.agrees
    assert report.tokens_agreeing == report.tokens
    assert {rollout_id for rollout_id, _ in of_rows(report)} == {ABORTED}
    assert any(says in message for _, message in of_rows(report))
    assert any(f"rollout {ABORTED}: " in line for line in report.lines())


def test_tokens_newer_than_the_version_they_were_trained_at_are_named(run: Path) -> None:
    edit_rollout(run, KEPT, lambda row: row.update(consumed_version=1, staleness=1))
    says = [message for rollout_id, message in of_rows(audit_run(run)) if rollout_id == KEPT]
    assert "consumed_version=1 is before v2, which sampled tokens of it" in says


@pytest.mark.parametrize(
    "edit",
    [
        {"consumed_version": 2, "staleness": None},
        {
            "state": "discarded",
            "discard_reason": "stale",
            "consumed_version": None,
            "staleness": None,
            "advantage": None,
            "oldest_trainable": None,
        },
    ],
)
def test_a_row_moved_consistently_to_another_batch_is_detected(booked_run: Path, edit: Row) -> None:
    rows = read_trajectories(booked_run)
    first = next(row.rollout_id for row in rows if row.consumed_version == 3)

    def lie(row: Row) -> None:
        row.update(edit)
        if row["state"] == "trained":
            row["staleness"] = 2 - min(s["version"] for t in row["turns"] for s in t["spans"])

    edit_rollout(booked_run, first, lie)
    report = audit_run(booked_run)
    assert not report.agrees
    says = [message for rollout_id, message in of_rows(report) if rollout_id < 0]
    assert any(m.startswith("trained at v3: 4 rollouts with 32 tokens by metrics") for m in says)


def of_one_group(run: Path) -> list[int]:
    """Return the rollouts of a trained group with different rewards."""
    rows = read_trajectories(run)
    return next(
        [a.rollout_id, b.rollout_id]
        for a, b in itertools.combinations(rows, 2)
        if a.group_id == b.group_id and a.reward != b.reward
    )


@pytest.mark.parametrize("column", ["reward", "advantage"])
def test_siblings_whose_rewards_or_advantages_are_swapped_are_detected(
    booked_run: Path, column: str
) -> None:
    rollouts = of_one_group(booked_run)
    values = [getattr(r, column) for r in read_trajectories(booked_run) if r.rollout_id in rollouts]
    for rollout_id, value in zip(rollouts, reversed(values), strict=True):
        edit_rollout(booked_run, rollout_id, partial(dict.update, **{column: value}))

    [(rollout_id, message)] = of_rows(audit_run(booked_run))
    assert rollout_id in rollouts
    assert message.startswith("advantage=")
    assert "the rewards of its group's 2 trained rollouts make" in message


def test_an_advantage_with_the_wrong_sign_is_detected(booked_run: Path) -> None:
    first, _ = of_one_group(booked_run)
    edit_rollout(booked_run, first, lambda row: row.update(advantage=-row["advantage"]))
    assert [rollout_id for rollout_id, _ in of_rows(audit_run(booked_run))] == [first]


@pytest.mark.parametrize(
    ("advantage", "problems"), [(1.5 / 1.0001, 0), (1.2, 1), (float("nan"), 1)]
)
def test_the_remainder_of_a_split_group_is_compared_with_what_was_trained_first(
    run: Path, advantage: float, problems: int
) -> None:
    std = 0.5**0.5 + 1e-4
    edit_rollout(run, 8, lambda row: row.update(reward=0.0, advantage=-0.5 / std))
    edit_rollout(run, 9, lambda row: row.update(reward=1.0, advantage=0.5 / std))
    remainder = {"group_id": 90, "index": 0, "reward": 2.0, "advantage": advantage}
    edit_rollout(run, 10, lambda row: row.update(remainder))
    found = of_rows(audit_run(run))
    assert [rollout_id for rollout_id, _ in found] == [10] * problems


def test_a_reward_that_is_no_number_is_detected(run: Path) -> None:
    edit_rollout(run, 8, lambda row: row.update(reward=float("nan")))
    assert [rollout_id for rollout_id, _ in of_rows(audit_run(run))] == [8]


def test_rewards_that_differ_from_the_trained_ones_are_detected_by_the_metrics(
    booked_run: Path,
) -> None:
    first, second = of_one_group(booked_run)
    for rollout_id in (first, second):  # the same advantages, from other rewards
        edit_rollout(booked_run, rollout_id, lambda row: row.update(reward=row["reward"] + 1))
    [(rollout_id, message)] = of_rows(audit_run(booked_run))
    assert rollout_id == -1
    assert "by metrics.jsonl" in message
    assert "mean reward" in message


def test_a_real_run_agrees_and_its_report_says_what_no_audit_checks(
    honest_booked_run: Path,
) -> None:
    report = audit_run(honest_booked_run)
    assert report.agrees
    assert report.lines()[-2].startswith("not audited: the rewards that episodes")


def test_rows_whose_batches_are_not_in_the_metrics_are_named(booked_run: Path) -> None:
    (booked_run / "metrics.jsonl").write_text("")
    assert of_rows(audit_run(booked_run)) == [
        (-1, "metrics.jsonl has no batch, and trajectories have trained rows")
    ]


def test_a_turn_moved_to_an_engine_without_prefill_reports_is_unknown_from_then_on(
    run: Path,
) -> None:
    def move(row: Row) -> None:
        turn = row["turns"][0]
        whole = turn["spans"][0]
        moved = {"start": 2, "engine": "elsewhere", "kv_oldest": None, "kv_newest": None}
        turn["spans"] = [whole | {"end": 2}, whole | moved]

    edit_rollout(run, ONE_VERSION, move)
    report = audit_run(run)
    assert report.agrees
    assert report.tokens_unknown == 3
    assert report.tokens_agreeing == report.tokens - 3


def test_part_of_a_run_can_be_audited_evenly_spaced(honest_run: Path) -> None:
    report = audit_run(honest_run, rollouts_max=4)
    assert (report.rollouts, report.rollouts_recorded) == (4, 13)
    assert report.agrees


def test_a_directory_without_a_run_names_the_missing_file(run: Path, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="is not a directory"):
        audit_run(tmp_path / "nowhere")
    (run / "trajectories.parquet").unlink()
    with pytest.raises(AuditError, match=r"trajectories\.parquet is missing"):
        audit_run(run)
    shutil.rmtree(run / "weights")
    with pytest.raises(AuditError, match="has no weights"):
        audit_run(run)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Record three versions, of which one weight in twenty changes, by a setting."""
    models = make_models(3, drift=0.2, changed_share=0.05)
    rollouts = [
        sampled_runs.one_version(models, version, version=version, tokens=6) for version in range(3)
    ]
    rollouts.append(sampled_runs.aborted(models, 3))
    directory = tmp_path_factory.mktemp("runs")
    return lambda setting: record_run(
        directory / setting.replace(":", "-"), models, rollouts, archive_weights=setting
    )


def test_an_audit_replays_versions_that_are_archived_as_patches(
    patched: Callable[[str], Path],
) -> None:
    run = patched("all")
    assert (weights_path(run, 2) / "patch.safetensors").exists()
    report = audit_run(run)
    assert (report.agrees, report.has_power, report.versions) == (True, True, 3)
    assert report.tokens_agreeing == report.tokens

    shutil.copy(weights_path(run, 1) / "patch.safetensors", weights_path(run, 2))
    with pytest.raises(AuditError, match=r"v00002 can't be loaded"):
        audit_run(run)


@pytest.mark.parametrize(
    ("setting", "left_out", "replayed"),
    [("every:2", "v1", [0, 2]), ("every:4", "v1 to v2", [0])],
)
def test_an_audit_says_which_versions_were_not_kept_and_what_to_set(
    patched: Callable[[str], Path], setting: str, left_out: str, replayed: list[int]
) -> None:
    report = audit_run(patched(setting))
    assert report.agrees
    assert report.versions == len(replayed)
    assert report.tokens_left_out == report.tokens - report.tokens_agreeing > 0
    assert (
        f"archive_weights='{setting}' did not keep {left_out}; record with archive_weights='all'"
        in "\n".join(report.lines())
    )


def test_a_run_without_archived_weights_is_refused_with_the_setting(
    patched: Callable[[str], Path],
) -> None:
    with pytest.raises(AuditError, match=r"archive_weights='none', .* archive_weights='all'"):
        audit_run(patched("none"))


def test_damaged_or_incomplete_weights_can_not_be_audited(run: Path) -> None:
    path = weights_path(run, 1) / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(AuditError, match=r"lacks 1 tensors .*, model\.norm\.weight"):
        audit_run(run)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(AuditError, match=r"v00001 can't be loaded"):
        audit_run(run)


def test_a_run_without_tokens_can_not_be_audited(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", make_models(1), [])
    with pytest.raises(AuditError, match="without a sampled token"):
        audit_run(run)


def test_a_token_at_the_top_p_threshold_counts_on_the_recorded_side() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]]))
    settings = torch.tensor([[1.0, 0.0, 0.75, 0.0]])  # two tokens reach top_p, up to rounding
    for kept, token_id in ((2, 0), (3, 0), (3, 2)):
        recorded = logits[0, token_id] - logits[0, :kept].logsumexp(0)
        found = sampled_logprobs(logits, torch.tensor([token_id]), settings, recorded[None])
        np.testing.assert_allclose(found, recorded, atol=1e-5)


def test_tokens_tied_at_top_k_may_all_be_kept_and_lower_ones_never() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1]]))
    settings = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    for kept in (2, 3):
        recorded = logits[0, 2] - logits[0, :kept].logsumexp(0)
        found = sampled_logprobs(logits, torch.tensor([2]), settings, recorded[None])
        np.testing.assert_allclose(found, recorded, atol=1e-5)
    outside = sampled_logprobs(logits, torch.tensor([3]), settings, torch.tensor([-0.1]))
    assert outside.tolist() == [-torch.inf]


def test_only_a_set_of_the_likeliest_tokens_that_normalises_the_log_prob_is_a_kept_set() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    recorded = float(torch.log_softmax(logits[[1, 2]], 0)[1])  # token 2, of tokens 1 and 2

    def error(kept: list[int], token_id: int = 2) -> float:
        return kept_set_error(logits, kept, token_id, recorded)

    assert error([1, 2]) < 1e-6
    assert error([2, 3]) == pytest.approx(2.0)  # token 1 exceeds token 3 by 2 nats
    assert error([1, 2, 3]) > 0.05
    assert error([]) > 0.1  # all tokens
    assert error([1], token_id=2) == float("inf")
    whole = float(torch.log_softmax(logits, 0)[2])
    assert kept_set_error(logits, [], 2, whole) < 1e-6
    tied = torch.tensor([1.0, 1.0, 0.0])
    assert kept_set_error(tied, [0], 0, 0.0) == 0.0  # ties may be cut either way
