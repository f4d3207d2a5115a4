"""A CPU as a platform of verl, which has none: for `examples/verl_grpo.py`.

verl imports it by ``VERL_USE_EXTERNAL_MODULES``, and selects it by ``VERL_PLATFORM=cpu``. With
``VERL_ENGINE_DEVICE=cuda`` verl's FSDP2 engine, registered for other devices, then trains on CPUs.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY_BYTES = 2**30
"""Any number: verl logs free and total memory of the device."""


class _CpuModule(types.ModuleType):
    """``torch.cpu`` with what verl also calls of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "mem_get_info":
            return lambda *_: (MEMORY_BYTES, MEMORY_BYTES)
        if name == "get_device_name":
            return lambda *_: "cpu"
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_: 0
        if name == "empty_cache":
            return lambda: None
        raise AttributeError(name)


@PlatformRegistry.register(platform="cpu")
class _CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("torch_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl moves tensors to this

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # verl's resource pools count GPUs, so Ray is started with one

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def _init_once_for_cpus(backend: str | None = None, *args: Any, **options: Any) -> None:
    """Replace verl's ``cpu:gloo,cpu:gloo``, which names the device twice: torch refuses that."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "gloo"
    _init_process_group(backend, *args, **options)


torch.distributed.init_process_group = _init_once_for_cpus
