"""Process of an external engine's adapter: ``python -m tidegate.engine.external.worker``.

The orchestrator starts one for each of its ``engine_urls``; users may start one by hand. The exit
status is that of :mod:`tidegate.engine.worker`. The engine itself keeps running when this process
ends.
"""

import argparse
import asyncio
import ctypes
import importlib
import itertools
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from tidegate.engine.external.adapter import Capabilities, EngineAdapter
from tidegate.engine.external.engine_loop import ExternalEngineLoop
from tidegate.engine.external.host_weights import (
    PublishedDirectories,
    read_host_weights,
    read_sizes,
)
from tidegate.engine.external.streams import STREAM_INTERVAL_TOKENS
from tidegate.engine.external.swaps import WeightSwapper
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.engine.worker import DEFECT, ENDED, PR_SET_PDEATHSIG, REFUSED, UNUSABLE
from tidegate.errors import ConfigError, TidegateError
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import KV_POLICIES, PAUSE_MODES, PROTOCOL, Hello
from tidegate.transport.printable import print_stderr
from tidegate.transport.private_directory import PrivateDirectory, remove_abandoned
from tidegate.transport.security import read_engine_keys
from tidegate.transport.server_keys import refuse_secrets
from tidegate.transport.weight_channels import WeightReceiverConfig, readable_channels

KINDS = {
    "sglang": "tidegate.engine.external.sglang",
    "vllm": "tidegate.engine.external.vllm",
}
"""Module of each kind of engine, with ``make_adapter(url, model)``."""

WEIGHTS = "weights="
"""Fragment of an engine URL, after ``#``, that names the transfer method of
weights; default: files."""

BLOCK_TOKENS = 16
"""Block size assumed for engines that do not report theirs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Connect one external engine to a run until either ends; return the process's exit status."""
    arguments = _parse(argv)
    if arguments.die_with_parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != arguments.die_with_parent:
            return ENDED
    try:
        return uvloop.run(_main(arguments))
    except TidegateError as error:
        print_stderr(f"error: {error}")
        return UNUSABLE
    finally:
        remove_abandoned()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tidegate.engine.external.worker",
        description="Worker of an external engine. The orchestrator starts one for each of its "
        "engine_urls; start one by hand for a run that other hosts can reach.",
    )
    parser.add_argument("--connect", required=True, help="the orchestrator's address")
    parser.add_argument("--url", required=True, help=f"KIND+URL; kinds: {', '.join(KINDS)}")
    parser.add_argument("--model", required=True, type=Path, help="the run's model directory")
    parser.add_argument("--engine", required=True, help="name, unique within the run")
    parser.add_argument(
        "--curve-key-directory", type=Path, help="directory that `tidegate keys` made for engines"
    )
    parser.add_argument(
        "--max-running-turns",
        type=int,
        help="limit of concurrent requests, if lower than the engine's own",
    )
    parser.add_argument(
        "--stream-interval-tokens",
        type=int,
        default=STREAM_INTERVAL_TOKENS,
        help="tokens of a turn that the engine may collect before it sends them; if it crashes, it "
        "loses up to one fewer of each running turn. Default: %(default)s; 1 with "
        "kv_policy='keep'",
    )
    parser.add_argument(
        "--weights-directory",
        type=Path,
        help="where published weights are written for the engine to load; both must see it by "
        "this path. Default: a temporary one",
    )
    parser.add_argument("--die-with-parent", type=int, metavar="PID")
    arguments = parser.parse_args(argv)
    if arguments.stream_interval_tokens < 1:
        parser.error(
            f"--stream-interval-tokens must be at least 1, got {arguments.stream_interval_tokens}"
        )
    return arguments


def open_adapter(url: str, model: Path) -> EngineAdapter:
    """Make the adapter for ``KIND+URL``.

    Raises:
        ConfigError: there is no such kind, or it needs a library that is not installed.
    """
    refuse_secrets(url)  # before an error message can contain the URL
    kind, _, location = url.partition("+")
    address, _, fragment = location.partition("#")
    if kind not in KINDS or not address:
        raise ConfigError(
            f"engine url {url!r} must be KIND+URL, such as 'vllm+http://127.0.0.1:8000'; kinds "
            f"are {', '.join(KINDS)}"
        )
    if fragment and not fragment.startswith(WEIGHTS):
        raise ConfigError(
            f"engine url {url!r} ends with #{fragment}; all that may follow there is #{WEIGHTS}WAY"
        )
    make_adapter = importlib.import_module(KINDS[kind]).make_adapter
    options = {"weights": fragment.removeprefix(WEIGHTS)} if fragment else {}
    adapter: EngineAdapter = make_adapter(address, model, **options)
    return adapter


async def _main(arguments: argparse.Namespace) -> int:
    directory = arguments.curve_key_directory
    keys = None if directory is None else read_engine_keys(directory)
    adapter = open_adapter(arguments.url, arguments.model)
    epoch = time.time_ns()  # a later start has a later epoch, and replaces this one
    make_label = _label_maker(epoch)
    label = make_label(0)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(adapter.close)
        capabilities = adapter.capabilities = await adapter.open(label)
        socket = DealerSocket(arguments.connect, arguments.engine.encode(), keys=keys)
        stack.callback(socket.close)
        hello = _hello(arguments, capabilities, epoch)
        link = OrchestratorLink(socket, hello)
        private = PrivateDirectory("published")
        stack.callback(private.remove)
        weights = await asyncio.to_thread(read_host_weights, arguments.model, capabilities)
        staging = Staging(weights.allocate_copy, WeightReceiverConfig(arguments.connect, keys))
        directories = PublishedDirectories(
            arguments.model, arguments.weights_directory or private.path
        )
        swapper = WeightSwapper(
            adapter,
            link,
            staging=staging,
            weights=weights,
            directories=directories,
            label=label,
            make_label=make_label,
        )
        engine_loop = ExternalEngineLoop(
            link,
            adapter,
            swapper,
            limits=_limits(hello),
            staging=staging,
            label=label,
            stream_interval_tokens=arguments.stream_interval_tokens,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, engine_loop.end_on_signal, f"got {number.name}")
        try:
            reason = await engine_loop.run()
        except Exception as error:  # noqa: BLE001 - any failure must reach the orchestrator
            traceback.print_exc()
            link.send_goodbye(f"failed: {type(error).__name__}: {error}", has_failed=True)
            return DEFECT
        finally:
            staging.close()
            directories.close()
        return _end(link, engine_loop, reason)


def _end(link: OrchestratorLink, engine_loop: ExternalEngineLoop, reason: str) -> int:
    if engine_loop.refusal is not None:
        print_stderr(f"error: the orchestrator refused this engine: {engine_loop.refusal}")
        return REFUSED
    has_failed = engine_loop.failure is not None
    is_requested = not has_failed and engine_loop.is_end_requested
    link.send_goodbye(reason, has_failed=has_failed, is_requested=is_requested)
    if engine_loop.failure is not None:
        print_stderr(f"error: {reason}")
        return DEFECT
    print_stderr(f"adapter ends: {reason}")
    return ENDED


def _label_maker(epoch: int) -> Callable[[int], str]:
    """Return a function that makes a label for a version's weights, unique across processes. Each
    call makes a new one, because a version may return with other weights."""
    suffix, counter = f"{epoch:x}{secrets.token_hex(2)}", itertools.count(1)
    return lambda version: f"v{version}.{next(counter)}.{suffix}"


def _hello(arguments: argparse.Namespace, capabilities: Capabilities, epoch: int) -> Hello:
    try:
        architecture, vocab_size = read_sizes(arguments.model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"can't read {arguments.model}/config.json: {error}; give --model the directory of the "
            "served model"
        ) from error
    block_tokens = capabilities.block_tokens or BLOCK_TOKENS
    running = min(
        capabilities.running_turns_max,
        arguments.max_running_turns or capabilities.running_turns_max,
    )
    blocks = capabilities.num_blocks or running * -(
        -capabilities.context_tokens_max // block_tokens
    )
    return Hello(
        protocol=PROTOCOL,
        engine=arguments.engine,
        epoch=epoch,
        weight_version=0,
        architecture=architecture,
        vocab_size=vocab_size,
        context_tokens_max=capabilities.context_tokens_max,
        max_running_turns=running,
        num_kv_blocks=blocks,
        block_tokens=block_tokens,
        pause_modes=PAUSE_MODES,
        kv_policies=KV_POLICIES if capabilities.keeps_kv else ["recompute"],
        weight_channels=[*readable_channels(has_gpu=False)],
        pid=os.getpid(),
        model_code=capabilities.engine,
        dtype=capabilities.dtype,
        score_kinds=sorted(capabilities.scores),
        media=sorted(capabilities.media),
        supports_submit_turns=True,
        sleep_levels=sorted(capabilities.sleep_levels),
    )


def _limits(hello: Hello) -> EngineLimits:
    return EngineLimits(
        max_running_turns=hello.max_running_turns,
        max_step_tokens=hello.max_running_turns,
        num_blocks=hello.num_kv_blocks,
        block_tokens=hello.block_tokens,
        context_tokens_max=hello.context_tokens_max,
        vocab_size=hello.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())
