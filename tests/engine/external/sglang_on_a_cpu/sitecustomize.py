"""Stubs of the CUDA packages that SGLang imports, so that it starts on a CPU.

Put this directory on PYTHONPATH: SGLang's processes run it at their start. A CPU run calls none of
the stubs.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

STUBBED = frozenset({"decord", "flashinfer", "sgl_kernel", "tilelang", "torchaudio", "torchvision"})


class _Anything(type):
    """A class whose attributes are more such classes, usable in annotations."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)

    def __or__(cls, other: object) -> "_Anything":
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> _Anything:
    if name.startswith("__"):  # callers of these test whether they are present
        raise AttributeError(name)

    def construct(self: object, *args: object, **options: object) -> None:
        pass

    def call(self: object, *args: Any, **options: object) -> Any:
        return args[0] if args else None  # as a decorator does that changes nothing

    return _Anything(name, (), {"__init__": construct, "__call__": call})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        made = _anything(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Unpinned(importlib.abc.MetaPathFinder):
    """Replaces pinned memory, which SGLang's LoRA requests and a CPU does not have."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname != "sglang.srt.lora":
            return
        import torch

        def unpinned(make: Any) -> Any:
            def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
                return make(*args, **options)

            return made

        for name in ("arange", "empty", "tensor", "zeros"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
        sys.meta_path.remove(self)


sys.meta_path.insert(0, _Unpinned())
sys.meta_path.append(_Finder())  # last: what is installed is not stubbed
