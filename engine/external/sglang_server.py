"""Inspects an SGLang server: version, sizes and flags; refuses one that cannot serve a run.

Called by ``SglangAdapter.open``; changes nothing in the server. Errors name the flag that helps.
Calls go through ``http.py``.
"""

from dataclasses import dataclass
from typing import Any

from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.engine.external.sglang_loras import lora_rank_max
from tidegate.errors import ConfigError
from tidegate.transport.sleep_messages import SleepLevel

RUNNING_TURNS_MAX = 256
"""Limit of concurrent requests if the server states none; more would wait in its queue, where their
priorities count less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServerInfo:
    """Properties that the server reports."""

    version: str
    context_tokens_max: int
    running_turns_max: int
    num_blocks: int
    block_tokens: int
    samples_ahead: bool
    """Whether the overlap scheduler is on, which runs one step ahead of the reported one. A pause
    in place leaves that step sampled by the old weights; 0.5.23 labels it with the new ones."""
    dtype: str
    """Compute dtype; empty if started with ``--dtype auto``, whose result the server
    does not report."""
    ranks: int
    """Number of tensor-parallel ranks; each needs the weights."""
    stages: int
    """Number of pipeline-parallel stages."""
    sleep_levels: frozenset[SleepLevel]
    """Empty without --enable-memory-saver; level 1 needs --enable-weights-cpu-backup."""
    lora_rank_max: int
    """Largest LoRA rank; 0 without LoRA, the overall limit if the server states none."""
    streams_incrementally: bool
    """Whether streams contain new tokens only (--incremental-streaming-output)."""
    returns_routed_experts: bool
    """Whether it was started with --enable-return-routed-experts."""


_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
"""Compute dtype of each explicit value of ``--dtype``."""


async def read_server_info(http: HttpEngine, architecture: str) -> SglangServerInfo:
    """Read a server's properties.

    Raises:
        ConfigError: it cannot serve a run; says how to start one that can.
        EngineGone: it does not answer.
    """
    info = await http.wait_for("/model_info")
    if not info.get("is_generation", True):
        raise ConfigError(
            f"the SGLang server at {http.url} serves embeddings; start one that generates"
        )
    architectures = info.get("architectures") or [architecture]
    if architecture not in architectures:
        raise ConfigError(
            f"the SGLang server at {http.url} serves a {architectures[0]}, and the run's model is "
            f"a {architecture}; start it with the run's model directory"
        )
    if preferred := info.get("preferred_sampling_params"):
        raise ConfigError(
            f"the SGLang server at {http.url} has sampling defaults of its own for options that a "
            f"turn leaves out ({preferred}); start it without --preferred-sampling-params"
        )
    await _refuse_old(http)
    settings = await _get(http, "/server_info")
    loads = (await _get(http, "/v1/loads"))["loads"]
    if len(loads) != 1:
        raise ConfigError(
            f"the SGLang server at {http.url} has {len(loads)} data-parallel replicas, and updates "
            f"reach only one of them; start one server per replica, with --dp-size 1"
        )
    models = (await _get(http, "/v1/models"))["data"]
    block_tokens = settings.get("page_size") or 1
    return SglangServerInfo(
        version=settings.get("version") or loads[0].get("version") or "of an unknown version",
        context_tokens_max=models[0]["max_model_len"],
        running_turns_max=min(
            RUNNING_TURNS_MAX, loads[0].get("max_running_requests") or RUNNING_TURNS_MAX
        ),
        num_blocks=loads[0]["max_total_num_tokens"] // block_tokens,
        block_tokens=block_tokens,
        samples_ahead=not settings.get("disable_overlap_schedule", False),
        dtype=_DTYPES.get(str(settings.get("dtype") or ""), ""),
        ranks=settings.get("tp_size") or 1,
        stages=settings.get("pp_size") or 1,
        sleep_levels=_sleep_levels(settings),
        lora_rank_max=lora_rank_max(settings),
        streams_incrementally=bool(settings.get("incremental_streaming_output")),
        returns_routed_experts=bool(settings.get("enable_return_routed_experts")),
    )


async def labels_tokens(http: HttpEngine) -> bool:
    """Return whether answers say which weights sampled which tokens; SGLang's do from 0.5.19 on.

    Call it only while the server is unpaused: a paused one never answers.
    """
    probe = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return "weight_versions" in (await http.call("POST", "/generate", probe))["meta_info"]


async def has_processed_logprobs(http: HttpEngine) -> bool:
    """Return whether log-probs are those after the temperature; raw ones ignore it.

    Sampled at half the temperature, the gap between two tokens' log-probs must double.
    """
    gaps = []
    for temperature in (1.0, 0.5):
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        meta = (await http.call("POST", "/generate", body))["meta_info"]
        logprobs = sorted(float(entry[0]) for entry in meta["output_top_logprobs"][0])
        gaps.append(logprobs[-1] - logprobs[0])
    return gaps[1] > 1.5 * gaps[0]


def _sleep_levels(settings: dict[str, Any]) -> frozenset[SleepLevel]:
    if not settings.get("enable_memory_saver"):
        return frozenset()
    return frozenset({1, 2} if settings.get("enable_weights_cpu_backup") else {2})


async def _refuse_old(http: HttpEngine) -> None:
    """Refuse servers before 0.5.21: older ones cannot be paused in place, or block on a lock."""
    paths = (await _get(http, "/openapi.json"))["paths"]
    missing = {"/pause_generation", "/update_weights_from_disk", "/v1/loads"} - paths.keys()
    if missing:
        raise ConfigError(
            f"the SGLang server at {http.url} has no {', '.join(sorted(missing))}; use 0.5.21 or "
            f"newer"
        )


async def _get(http: HttpEngine, path: str) -> Any:
    try:
        return await http.call("GET", path)
    except HttpStatusError as error:
        raise ConfigError(
            f"the server at {http.url} is not an SGLang server that a run can use: {error}"
        ) from error
