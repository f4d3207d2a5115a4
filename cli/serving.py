"""`tidegate serve`: serves a model by vLLM's API until it is told to end.

Imports nothing heavy before it runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import echo
from tidegate.transport.server_keys import CONTROL_TOKEN_VARIABLE, OWN_KEY_VARIABLE, own_key


def _refuse_key(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(
            f"keys on the command line are shown by ps: put it into {OWN_KEY_VARIABLE}, or into a "
            f"file that {OWN_KEY_VARIABLE}_FILE names"
        )


def serve(
    model: Annotated[Path, typer.Option(help="A Hugging Face directory.")],
    engines: Annotated[int, typer.Option(min=1, help="Processes that share the requests.")] = 1,
    host: Annotated[str, typer.Option(help="0.0.0.0 for other hosts.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call it; left out, its directory.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(hidden=True, callback=_refuse_key)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at once, per engine.")] = 64,
    threads_per_engine: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each; its share if left out.")
    ] = None,
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
    no_control_token: Annotated[
        bool,
        typer.Option(
            "--no-control-token",
            help="Let whoever reaches the port pause engines and change weights, as vLLM does: for "
            "trainers that send no token.",
        ),
    ] = False,
    weight_directory: Annotated[
        list[Path] | None,
        typer.Option(help="Requests may name weights and adapters below it; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name, beside its address, to call the server by; may be repeated."),
    ] = None,
    max_logprobs: Annotated[int, typer.Option(min=0, help="Told beside each token.")] = 20,
    generation_config: Annotated[
        str,
        typer.Option(help="auto: sampling defaults of the model's generation_config.json; vllm."),
    ] = "auto",
) -> None:
    """Serve a model by vLLM's HTTP API, weight updates and pauses included, until Ctrl-C.

    Keys are never on the command line, which `ps` shows. Paths under /v1 want the key in
    TIDEGATE_SERVER_KEY, or in the private file that TIDEGATE_SERVER_KEY_FILE names. Paths that
    pause engines or change weights want the token in TIDEGATE_CONTROL_TOKEN, or in the file that
    TIDEGATE_CONTROL_TOKEN_FILE names; without either, one is drawn and printed.
    """
    from tidegate import vllm_server

    control_token = own_key(CONTROL_TOKEN_VARIABLE)

    with vllm_server(
        model=model,
        engines=engines,
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=own_key(OWN_KEY_VARIABLE),
        control_token=control_token,
        needs_control_token=not no_control_token,
        weight_directories=weight_directory or (),
        allowed_hosts=allowed_host or (),
        max_logprobs=max_logprobs,
        generation_config=generation_config,  # type: ignore[arg-type]  # likewise
        dtype=dtype,  # type: ignore[arg-type]  # refused if unknown
        max_running_turns=max_num_seqs,
        threads_per_engine=threads_per_engine,
        weight_transfer=weight_transfer,  # type: ignore[arg-type]  # refused if unknown
        weight_checksums=weight_checksums,
        rejects_while_paused=not queue_while_paused,
    ) as server:
        echo(f"serving {model} at {server.url}")
        if server.control_token is not None and control_token is None:
            echo(f"control token: {server.control_token}")
        server.wait()
