"""The commands `tidegate serve` and `tidegate tinker`: serve a model over HTTP until Ctrl-C.

Call :func:`tidegate.vllm_server` and :func:`tidegate.tinker_server`. Imports nothing heavy before a
command runs.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.cli.conventions import echo
from tidegate.transport.server_keys import (
    CONTROL_TOKEN_VARIABLE,
    OWN_KEY_VARIABLE,
    own_key,
    tenant_keys,
)


def _refuse_key(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(
            f"keys on the command line are shown by ps: put it into {OWN_KEY_VARIABLE}, or into a "
            f"file that {OWN_KEY_VARIABLE}_FILE names"
        )


def serve(
    model: Annotated[
        Path, typer.Option(help="Model directory in Hugging Face format, or cached hub id.")
    ],
    engines: Annotated[
        int | None,
        typer.Option(min=1, help="Number of engine processes; default: 1, or one per --device."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="cpu, cuda or cuda:N; repeat it for engines on several GPUs."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, help="Port to listen on; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in requests; default: its directory.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(hidden=True, callback=_refuse_key)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at once, per engine.")] = 64,
    threads_per_engine: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads per engine; default: OMP_NUM_THREADS, or its share of cores."
        ),
    ] = None,
    num_kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache blocks per engine; default: by the free memory."),
    ] = None,
    kv_memory_share: Annotated[
        float | None,
        typer.Option(help="Share of the free memory for weights and KV; default: 0.9 of a GPU's."),
    ] = None,
    weight_transfer: Annotated[
        str,
        typer.Option(help="How trainers send weights: disk, gloo, or with CUDA nccl or ipc."),
    ] = "disk",
    weight_checksums: Annotated[
        bool, typer.Option("--weight-checksums", help="Compute checksums for /weight_checker.")
    ] = False,
    queue_while_paused: Annotated[
        bool,
        typer.Option(
            "--queue-while-paused", help="Queue requests while paused, as vLLM before 0.33 did."
        ),
    ] = False,
    no_control_token: Annotated[
        bool,
        typer.Option(
            "--no-control-token",
            help="Let every client pause engines and change weights, as vLLM does: for "
            "trainers that send no token.",
        ),
    ] = False,
    weight_directory: Annotated[
        list[Path] | None,
        typer.Option(help="Directory from which requests may load weights; repeatable."),
    ] = None,
    lora_directory: Annotated[
        Path | None,
        typer.Option(help="Directory of LoRA adapters, loaded when a request names one as model."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that requests may use beside the address; repeatable."),
    ] = None,
    max_logprobs: Annotated[int, typer.Option(min=0, help="Most log-probs per token.")] = 20,
    enable_return_routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts",
            help="Return the experts that a mixture routes each position to, with every answer.",
        ),
    ] = False,
    return_sampling_mask: Annotated[
        bool,
        typer.Option(
            "--return-sampling-mask",
            help="Return the tokens that top-p, top-k and min-p left, with every token.",
        ),
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(help="auto: sampling defaults of generation_config.json; vllm: vLLM's."),
    ] = "auto",
) -> None:
    """Serve a model by vLLM's HTTP API, with weight updates and pauses, until Ctrl-C.

    Keys are not accepted on the command line, which `ps` shows. All paths but probes and metrics
    require the key in TIDEGATE_SERVER_KEY, or in the private file that TIDEGATE_SERVER_KEY_FILE
    names, if either is set. Paths that pause engines or change weights require the token in
    TIDEGATE_CONTROL_TOKEN, or in the file that TIDEGATE_CONTROL_TOKEN_FILE names; without either, a
    token is generated and printed.
    """
    from tidegate import vllm_server

    control_token = own_key(CONTROL_TOKEN_VARIABLE)

    with vllm_server(
        model=model,
        **_engine_options(engines, device or []),
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=own_key(OWN_KEY_VARIABLE),
        control_token=control_token,
        needs_control_token=not no_control_token,
        weight_directories=weight_directory or (),
        lora_directory=lora_directory,
        allowed_hosts=allowed_host or (),
        max_logprobs=max_logprobs,
        attachments=[
            *(("routed_experts",) if enable_return_routed_experts else ()),
            *(("kept_tokens",) if return_sampling_mask else ()),
        ],
        generation_config=generation_config,  # type: ignore[arg-type]  # likewise
        dtype=dtype,  # type: ignore[arg-type]  # refused if unknown
        max_running_turns=max_num_seqs,
        threads_per_engine=threads_per_engine or _share_of_cores(engines or 1, device or []),
        num_kv_blocks=num_kv_blocks,
        kv_memory_share=kv_memory_share,
        weight_transfer=weight_transfer,  # type: ignore[arg-type]  # refused if unknown
        weight_checksums=weight_checksums,
        rejects_while_paused=not queue_while_paused,
    ) as server:
        echo(f"serving {model} at {server.url}")
        if server.control_token is not None and control_token is None:
            echo(f"control token: {server.control_token}")
        server.wait()


def tinker(
    model: Annotated[Path, typer.Option(help="Model directory in Hugging Face format.")],
    engines: Annotated[int, typer.Option(min=1, help="Number of engine processes.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; others need API keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, help="Port to listen on; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Base model's name in requests; default: its directory.")
    ] = None,
    state_directory: Annotated[
        Path | None,
        typer.Option(
            help="Directory of checkpoints and of what a restart continues; default: temporary."
        ),
    ] = None,
    run_directory: Annotated[
        Path | None,
        typer.Option(help="Directory of records: every sample and adapter version, for audits."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(hidden=True, callback=_refuse_key)] = None,
    tenant_models: Annotated[int, typer.Option(min=1, help="Models in training, per key.")] = 16,
    tenant_samples: Annotated[
        int, typer.Option(min=1, help="Sampling requests at once, per key.")
    ] = 4096,
    sampling_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="Another base model, sampled from and not trained, on one engine; repeatable.",
        ),
    ] = None,
    stable_reinforce: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="Loss computed for stable_reinforce, whose formula is not published: "
            "importance_sampling, ppo or cispo. Default: refused.",
        ),
    ] = None,
    tenant_sequence_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a sequence to train on.")
    ] = 32_768,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Samples at once, per engine.")] = 64,
    threads_per_engine: Annotated[
        int | None, typer.Option(min=1, help="CPU threads per engine; default: its share of cores.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that requests may use beside the address; repeatable."),
    ] = None,
) -> None:
    """Serve the Tinker API: train LoRA adapters of a model and sample from them, until Ctrl-C.

    Loops call it as tinker.ServiceClient(base_url="http://127.0.0.1:8000", api_key="tml-...").
    API keys begin with tml- and are not accepted on the command line, which `ps` shows: put one
    into TIDEGATE_SERVER_KEY, or lines `NAME KEY`, one for each tenant, into the private file that
    TIDEGATE_TENANT_KEYS_FILE names.
    """
    from tidegate import tinker_server
    from tidegate.serving.tinker.tenants import TenantLimits

    with tinker_server(
        model=model,
        engines=engines,
        host=host,
        port=port,
        served_model_name=served_model_name,
        state_directory=state_directory,
        api_keys=tenant_keys(),
        allowed_hosts=allowed_host or (),
        limits=TenantLimits(
            models=tenant_models, samples=tenant_samples, sequence_tokens=tenant_sequence_tokens
        ),
        sampling_models=_named_models(sampling_model or []),
        stable_reinforce=stable_reinforce,
        max_running_turns=max_num_seqs,
        threads_per_engine=threads_per_engine,
        run_directory=run_directory,
    ) as server:
        echo(f"serving the Tinker API for {model} at {server.url}")
        server.wait()


def _named_models(given: list[str]) -> dict[str, str]:
    """Return directories of models by name, from texts NAME=DIR."""
    models = {}
    for each in given:
        name, equals, directory = each.partition("=")
        if not (name and equals and directory):
            raise typer.BadParameter(
                f"--sampling-model is NAME=DIR, as in Qwen/Qwen3-8B=path/to/model, got {each!r}"
            )
        models[name] = directory
    return models


def _engine_options(engines: int | None, devices: list[str]) -> dict[str, Any]:
    """Return the settings of number and devices of the engines; one device needs no list."""
    options: dict[str, Any] = {} if engines is None else {"engines": engines}
    if len(devices) == 1:
        options["device"] = devices[0]
    elif devices:
        options["devices"] = devices
    return options


def _share_of_cores(engines: int, devices: list[str]) -> int | None:
    """Return the threads of each engine, where no trainer shares the cores; None: by default."""
    from tidegate.orchestrator.settings.config import CPU, ENGINE_THREADS_MAX, cores

    if os.environ.get("OMP_NUM_THREADS") or (devices and devices != [CPU]):
        return None
    return min(ENGINE_THREADS_MAX, max(1, cores() // engines))
