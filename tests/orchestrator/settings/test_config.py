"""Settings by flat name and by record, and what refuses them."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tidegate.errors import ConfigError
from tidegate.orchestrator.settings.config import (
    RECORD_OF,
    RECORDS,
    FleetSettings,
    RunSettings,
    StalenessSettings,
    WeightSettings,
    run_settings,
)

MODEL = Path("model")


def test_each_flat_name_belongs_to_one_record_and_no_record_has_the_name_of_a_setting() -> None:
    fields = [name for record in RECORDS.values() for name in record.model_fields]
    assert sorted(fields) == sorted(RECORD_OF)
    assert not set(RunSettings.model_fields) & set(fields)
    assert set(RunSettings.model_fields) == {"model", *RECORDS}


def test_flat_names_records_and_tables_give_equal_settings() -> None:
    flat = run_settings(model=MODEL, pause_mode="abort", engines_per_update_wave=2, max_staleness=1)
    weights = WeightSettings(pause_mode="abort", engines_per_update_wave=2)
    staleness = StalenessSettings(max_staleness=1)
    table = {"pause_mode": "abort", "engines_per_update_wave": 2}
    assert run_settings(model=MODEL, weights=weights, staleness=staleness) == flat
    assert run_settings(model=MODEL, weights=table, max_staleness=1) == flat
    assert RunSettings(model=MODEL, weights=weights, staleness=staleness) == flat


def test_a_flat_name_beside_its_record_sets_what_the_record_leaves_out() -> None:
    weights = WeightSettings(pause_mode="abort")
    both = run_settings(model=MODEL, weights=weights, weight_checksums=True)
    assert both.weights == WeightSettings(pause_mode="abort", weight_checksums=True)


def test_settings_by_flat_name_make_equal_settings() -> None:
    settings = run_settings(model=MODEL, group_size=3, device="cuda:1")
    by_name = settings.by_flat_name()
    assert set(by_name) == {"model", *RECORD_OF}
    assert run_settings(**by_name) == settings


def test_ray_carries_weights_by_relay_unless_set_otherwise() -> None:
    assert run_settings(model=MODEL, cluster="ray").weights.weight_channel == "relay"
    by_record = RunSettings(model=MODEL, fleet=FleetSettings(cluster="ray"))
    assert by_record.weights.weight_channel == "relay"
    reported = run_settings(model=MODEL, cluster="ray", weights={"weight_channel": "zmq"})
    assert reported.weights.weight_channel == "zmq"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"weights": {"engines_per_update_wave": 0}},
            "engines_per_update_wave=0: must be greater than or equal",
        ),
        ({"weights": {"puase_mode": "keep"}}, "no such setting; did you mean 'pause_mode'?"),
        ({"weights": {"seed": 1}}, "seed=1: no setting of weights, but of sampling"),
        ({"wieghts": {"pause_mode": "keep"}}, "no such setting; did you mean 'weights'?"),
        ({"weights": 7}, "weights=7: must be"),
        (
            {"weights": WeightSettings(pause_mode="keep"), "pause_mode": "abort"},
            "pause_mode is set twice, by itself and in weights",
        ),
        ({"group_size": 0, "max_tokens": 0}, "group_size=0: .*; max_tokens=0: "),
        ({"group_size": 0, "journal": True}, "group_size=0: .*; journal=True writes to"),
        ({"engine_urls": ["vllm+http://h:1", 2]}, r"engine_urls\.1=2"),
    ],
)
def test_what_is_wrong_is_named_by_its_flat_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_settings(model=MODEL, **values)
    assert re.match(f"(.*: )?{said}", str(refused.value)), str(refused.value)


def test_a_run_without_a_model_is_refused_in_few_words() -> None:
    with pytest.raises(ConfigError) as refused:
        run_settings(max_staleness=1)
    assert str(refused.value) == "model is missing"


def test_a_model_of_none_is_refused_in_words_also_where_the_engines_have_one() -> None:
    with pytest.raises(ConfigError) as refused:
        run_settings(model=None, engine_urls=["vllm+http://h:1"])
    assert str(refused.value).startswith(
        "model=None: must be a model directory or the id of a cached model, also with engine_urls"
    )


def test_settings_do_not_change() -> None:
    settings = run_settings(model=MODEL)
    with pytest.raises(ValidationError, match="frozen"):
        settings.weights.pause_mode = "abort"


def test_devices_and_servers_start_one_engine_each_unless_engines_are_set() -> None:
    assert run_settings(model=MODEL, devices=["cuda:1", "cuda:2"]).fleet.engines == 2
    assert run_settings(model=MODEL, devices=["cuda:1", "cuda:2"], engines=4).fleet.engines == 4
    assert run_settings(model=MODEL, engine={"devices": ["cuda:3"]}).engine.device_of(5) == "cuda:3"
    beside = run_settings(model=MODEL, devices=["cuda:1"], engine_urls=["vllm+http://h:1"])
    assert beside.fleet.engines_started == 2
    urls: dict[str, Any] = {"engine_urls": ["vllm+http://127.0.0.1:8000"]}
    assert run_settings(model=MODEL, **urls).fleet.engines_started == 1
    assert run_settings(model=MODEL, **urls, engines=2).fleet.engines_started == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"groups_per_batch": 8, "outstanding_groups_limit": 4}, "can never fill"),
        ({"engine_timeout_s": 1.0}, "must be at least twice heartbeat_interval_s"),
        ({"engines": 0}, "engines=0 starts no engine"),
        ({"evaluation_engines": 1}, "leaves none for training"),
        ({"num_kv_blocks": 9, "kv_memory_share": 0.5}, "num_kv_blocks=9 and kv_memory_share"),
        ({"episode_park_after_s": 600.0}, "episode_park_after_s=600"),
        ({"quantization": "fp8", "deterministic": True}, "products depend on the batch"),
        (
            {"quantization": "int8", "weight_deltas": "elements"},
            "quantization='int8' and weight_deltas='elements'",
        ),
        (
            {"tensor_parallel_size": 2, "weight_channel": "relay"},
            "set weight_channel to 'shm'",
        ),
        ({"engine_urls": ["http://127.0.0.1:8000"]}, "KIND+URL"),
        ({"engine_urls": ["vllm+http://me:secret@127.0.0.1:8000"]}, "password or a query"),
        ({"engine_urls": ["vllm+http://127.0.0.1:8000"] * 2}, "names a server twice"),
        (
            {"engine_urls": ["vllm+http://127.0.0.1:8000"], "step_time_min_s": 0.02},
            "step_time_min_s=0.02 slows engines that the run starts",
        ),
        ({"devices": ["cuda"]}, "devices.0='cuda'"),
        ({"devices": ["cuda:1"], "device": "cuda:0"}, "both choose where engines compute"),
        ({"devices": ["cuda:1", "cuda:2"], "engines": 1}, "are more than engines=1"),
        ({"devices": ["cuda:1"], "cluster": "ray"}, "set gpus_per_engine"),
        (
            {"devices": ["cuda:1", "cuda:2"], "weight_channel": "cuda_ipc"},
            "on the trainer's one GPU",
        ),
    ],
)
def test_settings_that_can_never_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_settings(model=MODEL, **values)


def test_attachments_are_named_by_the_options_of_generate_that_request_them() -> None:
    given = run_settings(model=MODEL, attachments=["hidden_states", "kept_tokens"])
    assert given.sampling.attachments == ("hidden_states", "kept_tokens")
    # A number of tokens belongs to top_logprobs, so a name alone does not request them.
    with pytest.raises(ConfigError, match=r"got kept_ids, top_logprobs$"):
        run_settings(model=MODEL, attachments=["kept_ids", "top_logprobs"])
