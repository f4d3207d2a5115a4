"""Options of `tidegate serve` that become settings of its engines."""

import os
from typing import Any

import pytest

from tidegate.cli import command


class Ended(Exception):
    """Raised in place of serving."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the command starts its server with."""
    given: dict[str, Any] = {}

    def vllm_server(**arguments: Any) -> None:
        given.update(arguments)
        raise Ended

    monkeypatch.setattr("tidegate.vllm_server", vllm_server, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return given


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {"threads_per_engine": 8, "num_kv_blocks": None}),
        (["--engines", "3"], {"engines": 3, "threads_per_engine": 2}),
        (["--threads-per-engine", "5"], {"threads_per_engine": 5}),
        (["--kv-memory-share", "0.5"], {"kv_memory_share": 0.5, "num_kv_blocks": None}),
        (["--device", "cpu"], {"device": "cpu", "threads_per_engine": 8}),
        (["--device", "cuda:1"], {"device": "cuda:1", "threads_per_engine": None}),
        (
            ["--device", "cuda:0", "--device", "cuda:1", "--num-kv-blocks", "9"],
            {"devices": ["cuda:0", "cuda:1"], "threads_per_engine": None, "num_kv_blocks": 9},
        ),
        (
            ["--enable-return-routed-experts", "--return-sampling-mask"],
            {"attachments": ["routed_experts", "kept_tokens"]},
        ),
    ],
)
def test_options_and_free_cores_become_settings(
    served: dict[str, Any], options: list[str], settings: dict[str, Any]
) -> None:
    with pytest.raises(Ended):
        command.app(["serve", "--model", "m", *options], standalone_mode=False)
    assert {name: served.get(name) for name in settings} == settings
    assert {"engines", "device", "devices"} & served.keys() <= settings.keys()


def test_omp_num_threads_is_left_to_the_runs_settings(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(Ended):
        command.app(["serve", "--model", "m"], standalone_mode=False)
    assert served["threads_per_engine"] is None
