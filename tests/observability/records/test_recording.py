"""RunRecorder: what is recorded reads back, also when called from several threads."""

import importlib.metadata
import json
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.observability.recorded import a_rollout, keep, recorder, some_statistics
from tidegate.errors import AuditError, ConfigError, RunClosed
from tidegate.observability.records.recording import read_trajectories
from tidegate.observability.records.trace import MERGE_GAP_US, Trace, read_trace
from tidegate.observability.records.trajectories import (
    STREAM_FILE,
    TRAJECTORIES_FILE,
    find_trajectory,
)
from tidegate.observability.records.weight_archive import RebuiltVersions, weights_path
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE
from tidegate.orchestrator.telemetry.recorder import EngineStep
from tidegate.transport.attachments import Attachment
from tidegate.transport.messages import KvSpan, SamplingParams


def test_a_rollout_reads_back_as_it_was_with_each_tokens_provenance(tmp_path: Path) -> None:
    given = a_rollout()
    with recorder(tmp_path / "run") as records:
        records.rollout(given, task={"sum": "1 + 2"}, advantage=0.5, consumed_version=5)
        given.turns[-1].append(99, -9.0, 5, "engine-1")  # later changes are not recorded

    [rollout] = read_trajectories(tmp_path / "run")

    assert json.loads(rollout.task) == {"sum": "1 + 2"}
    assert (rollout.rollout_id, rollout.group_id, rollout.index) == (7, 3, 1)
    assert (rollout.reward, rollout.advantage, rollout.state) == (1.0, 0.5, "trained")
    assert (rollout.consumed_version, rollout.staleness) == (5, 2)
    assert rollout.token_ids == [5, 6, 10, 7, 11, 12]
    assert rollout.logprobs == [0.0, 0.0, -0.5, 0.0, -1.5, -2.5]
    first, second = rollout.turns
    assert (first.start, first.length, first.finish_reason, first.seed) == (2, 1, "stop", 2**63)
    assert first.spans == (VersionSpan(3, 0, 1, "engine-0", KvRange(3, 3)),)
    assert (second.temperature, second.top_k, second.top_p) == (0.5, 9, 0.75)
    assert second.spans == (
        VersionSpan(3, 0, 1, "engine-1", KvRange(3, 3)),
        VersionSpan(4, 1, 2, "engine-1", KvRange(3, 4)),
    )
    assert second.prefills == (TurnPrefill(0, (KvSpan(3, 0, 4),)),)


def test_a_turns_parameters_and_attachments_read_back(tmp_path: Path) -> None:
    sampling = SamplingParams(
        max_tokens=4,
        min_p=0.5,
        raw_logprobs=True,
        top_logprobs=2,
        kept_tokens=True,
        routed_experts=True,
        hidden_states=True,
    )
    rollout = Rollout(1, group_id=0, index=0)
    rollout.extend([5, 6])
    for requested in (sampling, SamplingParams(max_tokens=9, seed=3, stop_token_ids=[4])):
        turn = Turn(rollout, requested)
        rollout.turns.append(turn)
        turn.append(10, -0.5, 3, "engine-0")
        if turn.attachments is not None:
            floats, ids = array("f", [-0.5, -1.5]), array("i", [10, 11])
            expert_ids = np.arange(12, dtype=np.uint8).tobytes()
            for reported in (
                Attachment(0, "raw_logprobs", 0, "float32", floats[:1].tobytes()),
                Attachment(0, "top_ids", 0, "int32", ids.tobytes(), [2]),
                Attachment(0, "top_logprobs", 0, "float32", floats.tobytes(), [2]),
                Attachment(
                    0, "kept_ids", 0, "int32", ids.tobytes(), counts=array("I", [2]).tobytes()
                ),
                Attachment(0, "routed_experts", 0, "uint8", expert_ids, [3, 2]),
                Attachment(0, "hidden_states", 0, "float32", floats.tobytes(), [2]),
            ):
                turn.attachments.append(reported, tokens_before=0)
        else:
            scored = array("f", [-3.0]).tobytes()
            turn.attach(Attachment(0, "teacher_logprobs", 0, "float32", scored))
    with recorder(tmp_path / "run") as records:
        keep(records, rollout)

    [recorded] = read_trajectories(tmp_path / "run")

    first, second = recorded.turns
    assert first.options == sampling
    assert (first.raw_logprobs, first.top_ids, first.top_logprobs) == (
        [-0.5],
        [10, 11],
        [-0.5, -1.5],
    )
    assert first.kept_ids == [[10, 11]]
    assert first.routed_experts is not None
    [(start, experts)] = first.routed_experts
    assert (start, experts.shape, experts.ravel().tolist()) == (0, (2, 3, 2), list(range(12)))
    assert first.hidden_states == array("f", [-0.5, -1.5]).tobytes()
    assert (first.teacher_logprobs, second.teacher_logprobs) == (None, [-3.0])
    assert second.options is None
    assert (second.raw_logprobs, second.top_ids, second.top_logprobs) == (None, None, None)
    assert (second.kept_ids, second.routed_experts) == (None, None)


def test_a_discarded_rollout_without_tokens_and_an_evaluated_one_are_rows_too(
    tmp_path: Path,
) -> None:
    discarded = Rollout(1, group_id=0, index=0)
    discarded.state = RolloutState.DISCARDED
    discarded.discard_reason = "episode_error"
    evaluated = a_rollout()
    evaluated.state = RolloutState.EVALUATED
    with recorder(tmp_path / "run") as records:
        records.rollout(discarded, task=object(), advantage=None, consumed_version=None)
        keep(records, evaluated)

    first, second = read_trajectories(tmp_path / "run")

    assert (first.state, first.discard_reason) == ("discarded", "episode_error")
    assert (first.token_ids, first.turns, first.staleness) == ([], (), None)
    assert isinstance(json.loads(first.task), str)
    assert (second.state, second.staleness) == ("evaluated", None)


def test_rollouts_from_many_threads_are_each_recorded_once(tmp_path: Path) -> None:
    with recorder(tmp_path / "run") as records, ThreadPoolExecutor(4) as threads:
        for first in range(0, 200, 50):
            threads.submit(keep, records, *map(a_rollout, range(first, first + 50)))
    assert sorted(r.rollout_id for r in read_trajectories(tmp_path / "run")) == list(range(200))
    schema = pq.read_schema(tmp_path / "run" / TRAJECTORIES_FILE)
    assert str(schema.field("token_ids").type) == "list<element: int32>"
    assert str(schema.field("logprobs").type) == "list<element: float>"


def test_archived_weights_are_those_at_the_call_even_if_training_continues(
    tmp_path: Path,
) -> None:
    weight = torch.ones(2, 2)
    with recorder(tmp_path / "run") as records:
        for version in range(1, 6):  # more than QUEUED_WEIGHTS_MAX
            records.weights(version, {"weight": weight, "tied": weight})
            weight.mul_(2)

    for version in range(1, 6):
        with closing(RebuiltVersions()) as rebuilt:
            path = rebuilt.directory(weights_path(tmp_path / "run", version))
            tensors = load_file(path / "model.safetensors")
        assert set(tensors) == {"weight"}
        assert torch.equal(tensors["weight"], torch.full((2, 2), 2.0 ** (version - 1)))
        assert (path / "config.json").read_text() == "{}"


def test_run_json_has_settings_packages_and_the_end(tmp_path: Path) -> None:
    settings = {"max_staleness": 2, "model": tmp_path}
    with recorder(tmp_path / "run", settings) as records:
        records.finish(some_statistics(), reward_before=0.25)
        records.finish(some_statistics(), reward_after=0.75)

    run = json.loads((tmp_path / "run" / "run.json").read_text())

    assert run["settings"] == {"max_staleness": 2, "model": str(tmp_path)}
    assert run["packages"]["torch"] == importlib.metadata.version("torch")
    assert run["extra"] == {"reward_before": 0.25, "reward_after": 0.75}
    assert run["statistics"]["staleness_histogram"] == {"2": 1}
    assert run["statistics"]["ledger"]["discarded"] == {"episode_error": 2}


def test_metrics_are_one_json_line_per_batch(tmp_path: Path) -> None:
    with recorder(tmp_path / "run") as records:
        records.batch({"version": 1, "reward": 0.5})
        records.batch({"version": 2, "reward": float("nan")})

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"version": 1, "reward": 0.5},
        {"version": 2, "reward": None},
    ]


def test_a_directory_with_a_run_and_a_model_without_config_are_refused(tmp_path: Path) -> None:
    recorder(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="it keeps no journal, so it can't be resumed"):
        recorder(tmp_path / "run")
    (tmp_path / "run" / JOURNAL_FILE).touch()
    with pytest.raises(ConfigError, match=r"resume it \(serve\(journal=True, resume=True\)"):
        recorder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"config\.json"):
        recorder(tmp_path / "other", model=tmp_path)


def test_recording_after_the_end_is_refused_and_closing_twice_is_harmless(tmp_path: Path) -> None:
    records = recorder(tmp_path / "run")
    records.close()
    records.close()
    with pytest.raises(RunClosed):
        keep(records, a_rollout())
    with pytest.raises(RunClosed):
        records.batch({})


def test_missing_or_truncated_trajectories_raise(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="missing"):
        list(read_trajectories(tmp_path))
    (tmp_path / "trajectories.parquet").write_bytes(b"PAR1 and then the power went")
    with pytest.raises(AuditError, match="unfinished"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("name", [TRAJECTORIES_FILE, STREAM_FILE])
def test_garbled_trajectories_are_read_or_refused_and_end_no_process(
    tmp_path: Path, name: str
) -> None:
    with recorder(tmp_path / "run") as records:
        keep(records, *map(a_rollout, range(60)))
        records.sync()
        recorded = (tmp_path / "run" / STREAM_FILE).read_bytes()
    if name == TRAJECTORIES_FILE:
        recorded = (tmp_path / "run" / name).read_bytes()
    refused = 0
    for seed in range(200):
        chance, garbled = random.Random(seed), bytearray(recorded)
        for _ in range(chance.randrange(1, 6)):
            # The first and last bytes describe the others.
            near = chance.choice([len(garbled), 3000])
            at = chance.choice([1, -1]) * chance.randrange(1, near)
            garbled[at : at + 8] = chance.choice([chance.randbytes(8), bytes(8)])
        (tmp_path / name).write_bytes(garbled)
        try:
            list(read_trajectories(tmp_path))
            find_trajectory(tmp_path, 3)
        except AuditError:
            refused += 1
    assert refused > 10


def test_steps_of_one_version_become_one_interval_and_a_swap_or_a_pause_ends_it(
    tmp_path: Path,
) -> None:
    with recorder(tmp_path / "run") as records:
        for at_us in (0, 500, 1000):
            records.engine_step(EngineStep("engine-0", at_us, 400, 1, 8))
        records.engine_event("engine-0", "swap", 1400, version=2)
        records.engine_step(EngineStep("engine-0", 1500, 400, 2, 8))
        records.engine_step(EngineStep("engine-0", 1900 + MERGE_GAP_US, 400, 2, 8))
        records.trainer_interval("train", 0, 3000, 1)
        records.trainer_interval("publish", 3000, 3500, 2)

    trace = read_trace(tmp_path / "run" / "trace.json")

    steps = [(i.name, i.started_us, i.ended_us, i.steps, i.rows) for i in trace.tracks["engine-0"]]
    assert steps == [
        ("v1", 0, 1400, 3, 24),
        ("v2", 1500, 1900, 1, 8),
        ("v2", 1900 + MERGE_GAP_US, 2300 + MERGE_GAP_US, 1, 8),
    ]
    assert [(i.name, i.version) for i in trace.tracks["trainer"]] == [("train", 1), ("publish", 2)]
    assert [(i.track, i.name, i.at_us, i.args) for i in trace.instants] == [
        ("engine-0", "swap", 1400, {"version": 2})
    ]
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    counter = [(e["ts"], e["args"]["version"]) for e in events if e["ph"] == "C"]
    assert counter == [(0, 1), (3500, 2)]


def test_a_trace_stays_bounded_and_loses_no_token_when_merged_coarser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.observability.records.trace.INTERVALS_MAX", 100)
    trace = Trace()
    for step in range(1000):
        trace.engine_step(
            EngineStep("engine-0", started_us=step * 5000, busy_us=100, version=step // 500, rows=3)
        )
    assert len(trace.tracks["engine-0"]) <= 100
    assert sum(i.rows for i in trace.tracks["engine-0"]) == 3000
