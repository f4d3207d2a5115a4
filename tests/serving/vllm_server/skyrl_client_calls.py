"""Script of a Python with SkyRL: calls every method of its client of inference servers.

Takes a JSON object with the servers' URLs and directories, and prints one with the answers. A call
that fails is reported as its status and message.
"""

import asyncio
import base64
import datetime
import inspect
import json
import logging
import pickle
import socket
import sys
from collections.abc import Awaitable
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.weight_sync import BroadcastInitInfo, CudaIpcInitInfo
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

PROMPT = [30, 41, 52, 63]
MESSAGES = [{"role": "user", "content": "say something"}]
GREEDY = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


class Calls:
    """A client that counts accesses to its methods."""

    def __init__(self, url: str, **fields: Any) -> None:
        self._client = RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny", **fields
        )
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self._client, name)

    def uncalled(self) -> list[str]:
        methods = vars(RemoteInferenceClient).items()
        named = {n for n, f in methods if inspect.iscoroutinefunction(f) and not n.startswith("_")}
        return sorted(named - self.called)

    async def sampled(self, model: str = "tiny") -> list[Any]:
        """Return the tokens and log-probs of a greedy continuation."""
        batch: Any = {"prompt_token_ids": [PROMPT], "sampling_params": GREEDY}
        output = await self.generate(batch, model=model)
        return list(zip(output["response_ids"][0], output["response_logprobs"][0], strict=True))


async def refusal(call: Awaitable[Any]) -> list[Any]:
    """Return the status and message that a call is refused with."""
    try:
        return [200, repr(await call)]
    except aiohttp.ClientResponseError as error:
        return [error.status, error.message]


def ipc_chunk() -> dict[str, Any]:
    """Return a chunk as SkyRL's sender makes it, of a handle that is valid on no GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    fields = (torch.Tensor, torch.Size([6]), (1,), 0, torch.storage.TypedStorage, torch.float32, 0)
    fields += (b"m" * 66, 24, 0, False, b"/torch_1_2_0", 0, b"e" * 64, True)  # type: ignore[assignment]
    pickled = base64.b64encode(pickle.dumps({"GPU": (rebuild_cuda_tensor, fields)})).decode()
    named = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]], "sizes": [6]}
    return {**named, "ipc_handles_pickled": pickled}


async def data_plane(client: Calls) -> dict[str, Any]:
    """Call what generates, renders and tokenises."""
    batch: Any = {
        "prompt_token_ids": [PROMPT, PROMPT[:2]],
        "sampling_params": GREEDY,
        "session_ids": ["a", "b"],
        "cache_salt": "version-0",
    }
    chunk = {"type": "encoded_text", "tokens": PROMPT}
    asked = {
        "prompt": {"chunks": [chunk]},
        "num_samples": 2,
        "sampling_params": {"temperature": 1.0, "max_tokens": 4, "seed": 3, "stop_tokens": [0]},
        "session_id": "s",
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    image = {"type": "image_asset_pointer", "location": "http://127.0.0.1/x.png"}
    chat = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "session_id": "s"}
    rendered = await client.render_chat_completion({"json": chat})
    again: Any = {
        "prompt_token_ids": [rendered["token_ids"]],
        "sampling_params": rendered["sampling_params"],
    }
    return {
        "generate": await client.generate(batch),
        "sample": await client.sample({"json": dict(asked)}),
        "sample_image": await refusal(
            client.sample({"json": {**asked, "prompt": {"chunks": [image]}}})
        ),
        "chat": await client.chat_completion({"json": {**chat, "return_token_ids": True}}),
        "rendered": rendered,
        "generate_rendered": await client.generate(again),
        "completion": await client.completion({"json": {"prompt": PROMPT, "max_tokens": 2}}),
        "tokenize": await client.tokenize(["say"], add_special_tokens=False),
        "detokenize": await client.detokenize([[30, 41]]),
        "finish_session": await client.finish_session("s"),
    }


async def control_plane(client: Calls) -> dict[str, Any]:
    """Call what pauses, puts to sleep and wakes."""
    before = await client.sampled()
    paused = [await client.pause_generation(), await client.pause("wait", clear_cache=True)]
    resumed = [await client.resume_generation(), await client.resume()]
    reset = await client.reset_prefix_cache(reset_running_requests=True)
    slept = [await client.sleep(), await client.wake_up(["weights"])]
    slept.append(await client.wake_up(["kv_cache"]))
    answers = [*paused, *resumed, reset, *slept]
    return {
        "world_size": await client.get_world_size(),
        "bodies": [each["body"] for answer in answers for each in answer.values()],
        "before": before,
        "after": await client.sampled(),
    }


async def adapters(client: Calls, directories: list[str]) -> list[Any]:
    """Load two adapters under one name, one after the other, then unload it."""
    sampled: list[Any] = []
    for directory in directories:
        await client.load_lora_adapter("skyrl-lora", directory)
        sampled.append(await client.sampled("skyrl-lora"))
    await client.unload_lora_adapter("skyrl-lora")
    return [*sampled, await refusal(client.sampled("skyrl-lora"))]


async def weights_from_disk(client: Calls, directories: list[str]) -> list[Any]:
    """Update by both methods that take an ``update_info`` of any backend."""
    sampled = []
    methods = (client.update_named_weights, client.update_weights_nccl)
    for directory, update in zip(directories, methods, strict=True):
        await client.start_weight_update(is_checkpoint_format=True)
        await update({"path": directory})
        await client.finish_weight_update()
        sampled.append(await client.sampled())
    return sampled


async def weights_over_gloo(client: Calls, directory: str) -> dict[str, Any]:
    """Send weights as SkyRL's broadcast sender does, with gloo in place of NCCL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    info = BroadcastInitInfo(
        master_addr="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=(await client.get_world_size())[0] + 1,
        override_existing_receiver=True,
    )
    timeout = datetime.timedelta(seconds=120)

    def group() -> Any:
        store = TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timeout)
        return ProcessGroupGloo(store, 0, 2, timeout)

    joined, _ = await asyncio.gather(
        asyncio.to_thread(group), client.init_weight_update_communicator(info)
    )
    tensors = load_file(f"{directory}/model.safetensors")
    update = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    await client.start_weight_update()
    packed = await refusal(client.update_weights_nccl({**update, "packed": True}))

    def broadcast() -> None:
        for tensor in tensors.values():
            joined.broadcast(tensor, 0).wait()

    await client.start_weight_update()
    await asyncio.gather(asyncio.to_thread(broadcast), client.update_weights_nccl(update))
    await client.finish_weight_update()
    return {"packed": packed, "sampled": await client.sampled()}


async def refusals(client: Calls, url: str) -> dict[str, Any]:
    """Call what needs CUDA, or what no engine here does."""
    info = BroadcastInitInfo(
        master_addr="127.0.0.1",
        master_port=1,
        rank_offset=1,
        world_size=2,
        override_existing_receiver=True,
    )
    nccl = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]], "packed": True}
    experts = Calls(url, enable_return_routed_experts=True)
    found = {
        "init": await refusal(client.init_weight_update_communicator(info)),
        "init_ipc": await refusal(
            client.init_weight_update_communicator(
                CudaIpcInitInfo(model_dtype_str="bfloat16", override_existing_receiver=True)
            )
        ),
        "kernel_format": await refusal(client.start_weight_update(is_checkpoint_format=False)),
        "finish": await refusal(client.finish_weight_update()),
        "experts": await refusal(experts.sampled()),
    }
    for name, update in (
        ("nccl", client.update_weights_nccl(nccl)),
        ("ipc", client.update_weights_ipc(ipc_chunk())),
    ):
        await client.start_weight_update()
        found[name] = await refusal(update)
    await experts.aclose()
    return found


async def run(given: dict[str, Any]) -> dict[str, Any]:
    """Make all calls; return their answers by subject."""
    client, gloo = Calls(given["url"]), Calls(given["gloo_url"])
    answers = {
        "data": await data_plane(client),
        "control": await control_plane(client),
        "adapters": await adapters(client, given["adapters"]),
        "refused": await refusals(client, given["url"]),
        "disk": await weights_from_disk(client, given["models"]),
        "gloo": await weights_over_gloo(gloo, given["models"][0]),
    }
    await client.teardown()
    await client.aclose()
    await gloo.aclose()
    return {**answers, "uncalled": client.uncalled()}


class Warnings(logging.Handler):
    """Collects warnings: :meth:`finish_session` reports its failures as nothing else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main() -> None:
    warnings = Warnings()
    logging.getLogger("skyrl").addHandler(warnings)
    answers = asyncio.run(run(json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps({**answers, "warnings": warnings.messages}) + "\n")


if __name__ == "__main__":
    main()
