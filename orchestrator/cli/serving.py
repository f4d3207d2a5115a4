"""What does `tidegate serve` do? Serves a model by vLLM's API until it is told to end.

Imports nothing heavy before it runs.
"""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    model: Annotated[Path, typer.Option(help="A Hugging Face directory.")],
    engines: Annotated[int, typer.Option(min=1, help="Processes that share the requests.")] = 1,
    host: Annotated[str, typer.Option(help="0.0.0.0 for other hosts; nothing guards it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call it; left out, its directory.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="What /v1 wants to be shown.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at once, per engine.")] = 64,
    threads_per_engine: Annotated[int, typer.Option(min=1, help="CPU threads of each.")] = 1,
    weight_transfer: Annotated[
        str,
        typer.Option(
            help="How trainers send weights: disk; from their process gloo, or with CUDA nccl, ipc."
        ),
    ] = "disk",
    weight_checksums: Annotated[
        bool, typer.Option("--weight-checksums", help="Check each tensor; for /weight_checker.")
    ] = False,
    queue_while_paused: Annotated[
        bool,
        typer.Option(
            "--queue-while-paused", help="As vLLM before 0.33: paused engines refuse no request."
        ),
    ] = False,
) -> None:
    """Serve a model by vLLM's HTTP API, weight updates and pauses included, until Ctrl-C."""
    from tidegate.orchestrator.vllm_server.server import VLLMServer

    with VLLMServer(
        model=model,
        engines=engines,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=api_key,
        dtype=dtype,
        max_running_turns=max_num_seqs,
        threads_per_engine=threads_per_engine,
        weight_transfer=weight_transfer,  # type: ignore[arg-type]  # refused if unknown
        weight_checksums=weight_checksums,
        rejects_while_paused=not queue_while_paused,
    ) as server:
        typer.echo(f"serving {model} at {server.url}")
        server.wait()
