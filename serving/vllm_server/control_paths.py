"""vLLM's paths that pause engines, put them to sleep and drop their caches.

Parameters are in the query, as in vLLM. What a pause does is decided in :mod:`control`.
"""

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from tidegate.serving.vllm_server.failures import ServerError
from tidegate.serving.vllm_server.paths import Answer, Paths, flag, mode_of

if TYPE_CHECKING:
    from tidegate.serving.vllm_server.desks import Desks

PATHS = Paths()


@PATHS.on("POST", "/pause", is_control=True)
async def pause(desks: "Desks", http: HttpRequest) -> Answer:
    """Stop generating: ``mode`` and ``clear_cache`` are in the query, a body is not read."""
    mode = mode_of(http)
    await desks.control.pause(mode, clear_cache=flag(http, "clear_cache", default=True))
    return {"status": "paused"}


@PATHS.on("POST", "/resume", is_control=True)
async def resume(desks: "Desks", http: HttpRequest) -> Answer:
    """Generate again."""
    await desks.control.resume()
    return {"status": "resumed"}


@PATHS.on("GET", "/is_paused")
async def is_paused(desks: "Desks", http: HttpRequest) -> Answer:
    """Whether nothing is generated."""
    return {"is_paused": desks.control.is_paused}


@PATHS.on("POST", "/sleep", is_control=True)
async def sleep(desks: "Desks", http: HttpRequest) -> Answer:
    """Give memory back: ``level`` and ``mode`` are in the query."""
    level = http.query_params.get("level", "1")
    if not level.isdecimal():
        raise ServerError(400, f"level must be 0, 1 or 2, got {level}", param="query.level")
    await desks.control.sleep(int(level), mode_of(http))
    return {"status": "sleeping", "level": int(level)}


@PATHS.on("POST", "/wake_up", is_control=True)
async def wake_up(desks: "Desks", http: HttpRequest) -> Answer:
    """Take memory again; ``tags`` may come several times in the query."""
    tags = http.query_params.getlist("tags") or None
    is_awake = await desks.control.wake(tags)
    return {"status": "awake" if is_awake else "sleeping", "tags": tags}


@PATHS.on("GET", "/is_sleeping")
async def is_sleeping(desks: "Desks", http: HttpRequest) -> Answer:
    """True for paused engines, too."""
    return {"is_sleeping": desks.control.is_sleeping}


@PATHS.on("POST", "/release_kv_cache_memory", is_control=True)
async def release_kv_cache_memory(desks: "Desks", http: HttpRequest) -> Answer:
    """Give back the caches' memory alone."""
    await desks.control.release_kv_cache()
    return {"status": "kv_cache_released"}


@PATHS.on("POST", "/reset_prefix_cache", is_control=True)
async def reset_prefix_cache(desks: "Desks", http: HttpRequest) -> Answer:
    """Forget contexts kept for later requests."""
    recomputes = flag(http, "reset_running_requests", default=False)
    done = await desks.control.reset_prefix_cache(recomputes_running=recomputes)
    return {"success": done}


@PATHS.on("POST", "/reset_mm_cache", is_control=True)
async def reset_mm_cache(desks: "Desks", http: HttpRequest) -> Answer:
    """There is none."""
    return None


@PATHS.on("POST", "/reset_encoder_cache", is_control=True)
async def reset_encoder_cache(desks: "Desks", http: HttpRequest) -> Answer:
    """There is none."""
    return None
