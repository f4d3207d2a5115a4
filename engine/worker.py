"""Command line and start-up of an engine process: ``python -m tidegate.engine.worker``.

The orchestrator starts it, or a user by hand. Exit status: 0 ended on request or because the
orchestrator is gone, 1 a defect, 2 a model or setting that cannot work, 3 refused by the
orchestrator.
"""

import argparse
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from tidegate.engine.device.devices import CPU, find_device
from tidegate.engine.device.memory import DeviceMemory, free_bytes
from tidegate.engine.drafts.draft_model import ModelDrafts
from tidegate.engine.drafts.draft_sources import open_drafts
from tidegate.engine.execution.images import SequenceImages
from tidegate.engine.execution.runner import ModelRunner, Runner
from tidegate.engine.execution.served_model import ServedModel, open_model
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.loop import EngineLoop
from tidegate.engine.memory import host_memory
from tidegate.engine.memory.kv_size import (
    KV_BYTES_MIN,
    block_tokens_default,
    kv_bytes,
    stored_bytes,
)
from tidegate.engine.memory.out_of_memory import blame_memory
from tidegate.engine.models.tokenizer import ModelTokenizer
from tidegate.engine.ranks.ranks import Ranks
from tidegate.engine.sampling.options import OptionReader
from tidegate.engine.sampling.processors import ProcessorRegistry
from tidegate.engine.scheduling.adapter_versions import VERSIONS_MAX_DEFAULT, AdapterVersions
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.errors import ConfigError, TidegateError
from tidegate.kernels.compiled import library
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import KV_POLICIES, PAUSE_MODES, PROTOCOL, Hello
from tidegate.transport.printable import print_stderr
from tidegate.transport.private_directory import remove_abandoned
from tidegate.transport.regular_files import check_all_regular
from tidegate.transport.security import EngineKeys, read_engine_keys
from tidegate.transport.weight_channels import WeightReceiverConfig, readable_channels
from tidegate.transport.weight_channels.cuda_memory import Gpu

ENDED, DEFECT, UNUSABLE, REFUSED = range(4)
"""Exit statuses."""

STEP_TIME_MIN_S_MAX = 1.0
"""Upper limit of --step-time-min. An engine reads no message and handles no signal during a step,
and a run treats an engine that is silent for some seconds as lost."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: sets the signal that the process gets when its parent dies."""


SWITCH_INTERVAL_S = 0.0005
"""Longest time for which another thread keeps Python's interpreter lock while the stepping thread
waits for it, set with :func:`sys.setswitchinterval`. At Python's 5 ms, staging a patched version
delayed the longest decode step by 1.0 to 2.5 usual ones (``benchmarks.engine.steps --patches``,
small model, 32 turns), because decoding patches is Python and numpy; at this value by 0.35."""


def main(argv: Sequence[str] | None = None, keys: EngineKeys | None = None) -> int:
    """Run one engine until it ends; return the process's exit status.

    ``keys`` are an alternative to --curve-key-directory for callers that hold them in memory.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    arguments = _parse(argv)
    if arguments.die_with_parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != arguments.die_with_parent:
            remove_abandoned()
            return ENDED  # the parent died during imports, before the signal was set
    ranks = None
    try:
        if arguments.curve_key_directory is not None:
            keys = read_engine_keys(arguments.curve_key_directory)
        ranks = Ranks(
            arguments.tensor_parallel_size, is_deterministic=bool(arguments.deterministic)
        )
        _refuse_irregular(arguments.model)
        device = find_device(arguments.device)
        model = _model(arguments, device, ranks)
        limits = _limits(arguments, model, device)
        options = _options(arguments, model, limits)
        torch.set_num_threads(arguments.threads)
        ranks.start(_rank_arguments(arguments, limits))
        runner = ranks.lead(_runner(model, limits), keys)
        drafts = None
        if (source := arguments.speculative_method) is not None:
            drafts = open_drafts(source, model, limits, arguments.dtype, runner)
        socket = DealerSocket(arguments.connect, arguments.engine.encode(), keys=keys)
    except TidegateError as error:
        print_stderr(f"error: {error}")
        if ranks is not None:
            ranks.close()
        return UNUSABLE
    warnings = _warnings(model, device)
    for warning in warnings:
        print_stderr(f"warning: {warning}")
    weights = f"{stored_bytes(arguments.model) / 2**30:.2f} GiB of weights in files"
    cache = _cache_text(model, limits)
    print_stderr(f"memory: {weights}, twice while new ones are staged; KV cache: {cache}")
    # All objects so far live to the end, so the garbage collector need not scan them.
    gc.collect()
    gc.freeze()
    adapters = AdapterVersions(0)
    if isinstance(runner, ModelRunner):  # no other applies adapters
        runner.adapter_versions = adapters = AdapterVersions(arguments.adapters_max)
    hello = _hello(arguments, model, limits, adapters.versions_max)
    link = OrchestratorLink(socket, msgspec.structs.replace(hello, warnings=warnings))
    gpu = None if device is None else Gpu(device)
    staging = ranks.staging(model.allocate, WeightReceiverConfig(arguments.connect, keys, gpu=gpu))
    try:
        scheduler = EngineScheduler(
            limits,
            options=options,
            scoring=model.scoring,
            drafts=drafts,
            adapters=adapters,
            images=None if model.images is None else SequenceImages(model.images),
        )
        memory = None if device is None else DeviceMemory(device)
        sleeping = drafts.sleeping_runner if isinstance(drafts, ModelDrafts) else runner
        sleep_controller = ranks.sleep_controller(
            sleeping, staging, scheduler, model.reload, memory
        )
        loop = EngineLoop(
            link,
            runner=runner,
            scheduler=scheduler,
            staging=staging,
            sleep_controller=sleep_controller,
            step_time_min_s=arguments.step_time_min,
        )
        return _serve(link, loop, staging)
    finally:
        socket.close()
        options.close()
        ranks.close()
        remove_abandoned()  # a killed run leaves files that no other process removes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tidegate engine",
        description="Run one inference engine. The orchestrator starts local engines itself; start "
        "engines on other hosts with this command.",
    )
    parser.add_argument("--connect", required=True, help="the orchestrator's address")
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model directory")
    parser.add_argument("--engine", required=True, help="the engine's name, unique within the run")
    parser.add_argument(
        "--curve-key-directory",
        type=Path,
        help="key directory that `tidegate keys` created for engines, copied to this host",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="compute dtype; auto: the model's, with float16 computed in float32",
    )
    parser.add_argument(
        "--device",
        default=CPU,
        help="cpu, cuda or cuda:N (needs Triton); default: cpu",
    )
    parser.add_argument(
        "--num-kv-blocks",
        type=int,
        help="number of KV cache blocks; raise it if turns are preempted, lower it if memory runs "
        "out; default: what all turns can use, within 256 MiB or --memory-sharers",
    )
    parser.add_argument(
        "--memory-sharers",
        type=int,
        metavar="COUNT",
        help="size the KV cache by the memory that is free, divided by this number of processes: "
        "the engines that start there, and a trainer",
    )
    parser.add_argument(
        "--kv-memory-share",
        type=float,
        metavar="SHARE",
        help="share of the free memory, above 0 and at most 1, that weights and KV cache of "
        "--memory-sharers (1 unless given) may take; default: 0.9 of a device's, 0.25 of a host's",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        help="tokens per KV block; smaller blocks share more of a common prefix; the bits of "
        "--deterministic depend on it; default: 16, and more for models with a recurrent state, of "
        "which each block holds a copy",
    )
    parser.add_argument(
        "--max-running-turns",
        type=int,
        default=64,
        help="turns decoded in one step; raise it if turns wait and the KV cache has room; "
        "default: 64",
    )
    parser.add_argument(
        "--adapters-max",
        type=int,
        default=VERSIONS_MAX_DEFAULT,
        help="versions of LoRA adapters in memory, for adapters with versions of their own; the "
        f"least recently used leaves first; default: {VERSIONS_MAX_DEFAULT}",
    )
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        default=1024,
        help="tokens computed per step, at least --max-running-turns; lower it if prefills delay "
        "decoding or memory runs out; default: 1024",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads, no more than cores that are free; default: 1",
    )
    parser.add_argument(
        "--step-time-min",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help=f"shortest time of a step, 0 to {STEP_TIME_MIN_S_MAX:g} s, to imitate a larger model; "
        "default: 0",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="RANKS",
        help="number of processes that share a model which is too large for one; default: 1",
    )
    parser.add_argument(
        "--quantization",
        choices=("int8", "fp8"),
        help="round the layers' weights of each version to one byte",
    )
    parser.add_argument(
        "--logits-processors",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module, and offer the logits processors in its PROCESSORS; repeatable",
    )
    parser.add_argument(
        "--image-directory",
        action="append",
        default=[],
        type=Path,
        metavar="DIRECTORY",
        help="images may be read by path from this directory; repeatable",
    )
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="batch-invariant: a turn's bits do not depend on batch, chunking or engine; default: "
        "if the model is computed in bfloat16",
    )
    parser.add_argument(
        "--speculative-method",
        metavar="SOURCE",
        help="speculative decoding; draft tokens come from the turn's own context ('lookup'), "
        "also from earlier samples of its prompt ('rollouts'), or from a smaller model with the "
        "same vocabulary ('draft:DIRECTORY')",
    )
    parser.add_argument(
        "--die-with-parent",
        type=int,
        metavar="PID",
        help="exit when the parent process with this PID ends",
    )
    return parser.parse_args(argv)


def _model(arguments: argparse.Namespace, device: torch.device | None, ranks: Ranks) -> ServedModel:
    if device is None:
        return open_model(
            arguments.model,
            arguments.dtype,
            is_deterministic=arguments.deterministic,
            quantization=arguments.quantization,
            shard=ranks.shard,
            group=ranks.group,
            image_directories=arguments.image_directory,
        )
    from tidegate.engine.device import model

    model.refuse_on_device(
        device,
        is_deterministic=bool(arguments.deterministic),
        quantization=arguments.quantization,
        tensor_parallel_size=arguments.tensor_parallel_size,
        speculative_method=arguments.speculative_method,
    )
    return model.open_on_device(arguments.model, arguments.dtype, device)


def _refuse_irregular(directory: Path) -> None:
    """Refuse a model directory with a FIFO or device file in it, on which reads would block."""
    try:
        if directory.is_dir():
            check_all_regular(directory)
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}") from None


def _limits(
    arguments: argparse.Namespace, model: ServedModel, device: torch.device | None
) -> EngineLimits:
    if arguments.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {arguments.threads}")
    if arguments.memory_sharers is not None and arguments.memory_sharers < 1:
        raise ConfigError(f"--memory-sharers must be at least 1, got {arguments.memory_sharers}")
    share = arguments.kv_memory_share
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"--kv-memory-share must be above 0 and at most 1, got {share:g}")
    if share is not None and arguments.num_kv_blocks is not None:
        raise ConfigError("--num-kv-blocks and --kv-memory-share both size the KV cache; omit one")
    if not 0 <= arguments.step_time_min <= STEP_TIME_MIN_S_MAX:
        raise ConfigError(
            f"--step-time-min must be between 0 and {STEP_TIME_MIN_S_MAX:g} s, got "
            f"{arguments.step_time_min:g}"
        )
    if arguments.block_tokens is None:
        arguments.block_tokens = block_tokens_default(
            token_bytes=model.kv_token_bytes(), state_bytes=model.state_bytes()
        )
    num_blocks = arguments.num_kv_blocks
    if num_blocks is None:
        num_blocks = _default_blocks(arguments, model, device)
    return EngineLimits(
        max_running_turns=arguments.max_running_turns,
        max_step_tokens=arguments.max_step_tokens,
        num_blocks=num_blocks,
        block_tokens=arguments.block_tokens,
        context_tokens_max=model.context_tokens_max,
        vocab_size=model.vocab_size,
    )


def _rank_arguments(arguments: argparse.Namespace, limits: EngineLimits) -> list[str]:
    given: dict[str, object] = {
        "rank-0": os.getpid(),
        "orchestrator": arguments.connect,
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "num-kv-blocks": limits.num_blocks,
        "block-tokens": limits.block_tokens,
    }
    if arguments.quantization is not None:
        given["quantization"] = arguments.quantization
    flags = ["--deterministic"] if arguments.deterministic else []
    return [*(f"--{name}={value}" for name, value in given.items()), *flags]


def _options(
    arguments: argparse.Namespace, model: ServedModel, limits: EngineLimits
) -> OptionReader:
    scoring = model.scoring
    return OptionReader(
        vocab_size=limits.vocab_size,
        max_running_turns=limits.max_running_turns,
        tokenizer=ModelTokenizer(arguments.model),
        registry=ProcessorRegistry(arguments.logits_processors),
        refused_options=model.refused_options,
        hidden_size=scoring.hidden_size if "hidden_states" in scoring.score_kinds else 0,
    )


def _default_blocks(
    arguments: argparse.Namespace, model: ServedModel, device: torch.device | None
) -> int:
    """Return the blocks that fit the memory, at most what all turns can use, and at least one."""
    block_tokens = max(1, arguments.block_tokens)
    affordable = _kv_bytes(arguments, device) // _block_bytes(model, block_tokens)
    usable = arguments.max_running_turns * -(-model.context_tokens_max // block_tokens)
    return max(1, min(int(affordable), int(usable)))


def _block_bytes(model: ServedModel, block_tokens: int) -> int:
    return model.kv_token_bytes() * block_tokens + model.state_bytes()


def _kv_bytes(arguments: argparse.Namespace, device: torch.device | None) -> int:
    if arguments.memory_sharers is None and arguments.kv_memory_share is None:
        return KV_BYTES_MIN
    available = host_memory.available_bytes() if device is None else free_bytes(device)
    return kv_bytes(
        available_bytes=available,
        sharers=arguments.memory_sharers or 1,
        weights_bytes=stored_bytes(arguments.model),
        on_host=device is None,
        share=arguments.kv_memory_share,
    )


def _runner(model: ServedModel, limits: EngineLimits) -> Runner:
    """Allocate the weights and the KV cache, nearly all of an engine's memory."""
    doing = f"for a KV cache of {_cache_text(model, limits)}"
    with blame_memory(doing=doing, remedy="lower num_kv_blocks"):
        return model.make_runner(num_blocks=limits.num_blocks, block_tokens=limits.block_tokens)


def _cache_text(model: ServedModel, limits: EngineLimits) -> str:
    kv_bytes = limits.num_blocks * _block_bytes(model, limits.block_tokens)
    size = f"{kv_bytes / 2**30:.1f} GiB"
    return f"{limits.num_blocks} blocks of {limits.block_tokens} tokens, {size}"


def _serve(link: OrchestratorLink, loop: EngineLoop, staging: Staging) -> int:
    """Run the loop to its end, and report the reason to the orchestrator."""
    _end_on_signals(loop)
    try:
        reason, status = loop.run(), ENDED
    except TidegateError as error:
        reason, status = str(error), DEFECT
        print_stderr(f"error: {reason}")
    except Exception as error:  # noqa: BLE001  (any failure must reach the orchestrator)
        traceback.print_exc()
        reason, status = f"failed: {type(error).__name__}: {error}", DEFECT
    finally:
        staging.close()
    if loop.refusal is not None:  # a refused engine sends no goodbye
        print_stderr(f"error: the orchestrator refused this engine: {loop.refusal}")
        return REFUSED
    is_requested = status == ENDED and loop.is_end_requested
    link.send_goodbye(reason, has_failed=status == DEFECT, is_requested=is_requested)
    if status == ENDED:
        print_stderr(f"engine ends: {reason}")
    return status


def _warnings(model: ServedModel, device: torch.device | None) -> list[str]:
    warnings = [] if model.warning is None else [model.warning]
    if device is None and library() is None:
        warnings.append(
            "no kernels could be compiled, so torch's operators compute the model, in two to three "
            "times the CPU time; install a C++ compiler, or name one by CXX. The engine's log has "
            "the reason"
        )
    return warnings


def hello_of(name: str, model: ServedModel, limits: EngineLimits, **more: Any) -> Hello:
    """Return the hello of an engine of Tidegate; ``more`` are what its process adds."""
    return Hello(
        protocol=PROTOCOL,
        engine=name,
        weight_version=0,
        architecture=model.architecture,
        vocab_size=limits.vocab_size,
        context_tokens_max=limits.context_tokens_max,
        max_running_turns=limits.max_running_turns,
        num_kv_blocks=limits.num_blocks,
        block_tokens=limits.block_tokens,
        pause_modes=PAUSE_MODES,
        kv_policies=KV_POLICIES,
        model_code=model.code,
        dtype=model.dtype,
        score_kinds=list(model.scoring.score_kinds),
        is_deterministic=model.is_deterministic,
        supports_submit_turns=True,
        supports_sessions=True,
        media=[] if model.images is None else ["image"],
        **more,
    )


def _hello(
    arguments: argparse.Namespace, model: ServedModel, limits: EngineLimits, adapters_max: int
) -> Hello:
    ranks, has_gpu = arguments.tensor_parallel_size, arguments.device != CPU
    return hello_of(
        arguments.engine,
        model,
        limits,
        epoch=time.time_ns(),  # a later start has a later epoch, and replaces this one
        weight_channels=[*readable_channels(has_gpu=has_gpu, ranks=ranks)],
        pid=os.getpid(),
        speculative_method=(arguments.speculative_method or "").partition(":")[0],
        sleep_levels=[1, 2],
        tensor_parallel_size=ranks,
        quantization=arguments.quantization or "",
        adapters_max=adapters_max,
        device=arguments.device,
    )


def _end_on_signals(loop: EngineLoop) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        loop.end_on_request(f"got {signal.Signals(number).name}")

    # In other threads the embedding program handles signals.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)


if __name__ == "__main__":
    sys.exit(main())
