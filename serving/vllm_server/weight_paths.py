"""vLLM's paths that change what engines serve: the four phases, labels, checks and adapters.

:mod:`weight_desk` receives weights and brings them to engines.
"""

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.vllm_server import protocol
from tidegate.serving.vllm_server.failures import ServerError
from tidegate.serving.vllm_server.paths import Answer, Paths, read, read_bytes

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

PATHS = Paths()


@PATHS.on("GET", "/get_world_size")
async def get_world_size(desks: "Desks", http: HttpRequest) -> Answer:
    """1: one process takes weights in, and brings them to all engines."""
    return {"world_size": 1}


@PATHS.on("POST", "/init_weight_transfer_engine", is_control=True)
async def init_weight_transfer(desks: "Desks", http: HttpRequest) -> Answer:
    """Meet the trainer."""
    request: protocol.InitRequest = await read(http, protocol.InitRequest)
    await desks.weights.init(request.init_info)
    return {"message": "Weight transfer initialized"}


@PATHS.on("POST", "/shutdown_weight_transfer_engine", is_control=True)
async def shut_down_weight_transfer(desks: "Desks", http: HttpRequest) -> Answer:
    """Let go of it."""
    await desks.weights.shut_down()
    return {"message": "Weight transfer shut down"}


@PATHS.on("POST", "/start_weight_update", is_control=True)
async def start_weight_update(desks: "Desks", http: HttpRequest) -> Answer:
    """Begin an update; a body, as older clients send it, is not read."""
    await desks.weights.start()
    return {"message": "Weight update started"}


@PATHS.on("POST", "/update_weights", is_control=True)
async def update_weights(desks: "Desks", http: HttpRequest) -> Answer:
    """Take in tensors."""
    request: protocol.UpdateRequest = await read(http, protocol.UpdateRequest)
    await desks.weights.update(request.update_info)
    return {"message": "Weights updated"}


@PATHS.on("POST", "/finish_weight_update", is_control=True)
async def finish_weight_update(desks: "Desks", http: HttpRequest) -> Answer:
    """Bring them to all engines."""
    body = await read_bytes(http)
    request = protocol.FinishRequest()
    if body.strip():
        request = protocol.read_body(body, protocol.FinishRequest)
    await desks.weights.finish(request.weight_version)
    return {"message": "Weight update finished"}


@PATHS.on("POST", "/update_weight_version", is_control=True)
async def update_weight_version(desks: "Desks", http: HttpRequest) -> Answer:
    """Call what is served so."""
    request: protocol.VersionRequest = await read(http, protocol.VersionRequest)
    desks.weights.rename(request.new_version)
    return {"success": True, "new_version": request.new_version}


@PATHS.on("GET", "/weight_info")
async def weight_info(desks: "Desks", http: HttpRequest) -> Answer:
    """What is served is called so."""
    return {"weight_version": desks.weights.labels.newest}


@PATHS.on("POST", "/weight_checker", is_control=True)
async def weight_checker(desks: "Desks", http: HttpRequest) -> Answer:
    """Checksums of what is served."""
    request: protocol.CheckRequest = await read(http, protocol.CheckRequest)
    return await desks.weights.check(request.action, request.baseline)


@PATHS.on("POST", "/collective_rpc", is_control=True)
async def collective_rpc(desks: "Desks", http: HttpRequest) -> Answer:
    """``reload_weights`` alone."""
    request: protocol.RpcRequest = await read(http, protocol.RpcRequest)
    if request.method != "reload_weights":
        told = f"collective_rpc does reload_weights alone, got {request.method}"
        raise ServerError(501, told, param="method")
    path = request.kwargs.get("weights_path")
    if not isinstance(path, str | None):
        raise ServerError(400, f"weights_path must be a directory, got {path!r}", param="kwargs")
    await desks.weights.reload(path)
    return {"results": [None]}


@PATHS.on("POST", "/v1/load_lora_adapter", is_control=True)
async def load_lora_adapter(desks: "Desks", http: HttpRequest) -> Answer:
    """Bring an adapter to all engines."""
    request: protocol.LoadAdapterRequest = await read(http, protocol.LoadAdapterRequest)
    await desks.weights.load_adapter(
        request.lora_name, request.lora_path, is_in_place=request.load_inplace
    )
    return Response(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


@PATHS.on("POST", "/v1/unload_lora_adapter", is_control=True)
async def unload_lora_adapter(desks: "Desks", http: HttpRequest) -> Answer:
    """Have all engines forget one."""
    request: protocol.UnloadAdapterRequest = await read(http, protocol.UnloadAdapterRequest)
    await desks.weights.unload_adapter(request.lora_name)
    return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")
