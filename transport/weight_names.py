"""Groups of tensor names that correspond between a model directory and its ``state_dict()``.

transformers converts some tensors while it loads a directory: the matrices of a mixture's experts
become one tensor, a fused projection becomes several, others are only renamed. A trainer may
publish under either set of names. Callers pass transformers' own conversions to
:func:`name_groups`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

DRAFT_PREFIX = "draft."
"""Prefix of the names of a draft model's tensors in a version, before its directory's names."""

WRAPPERS: Mapping[str, str] = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Wrappers of modules by the part that each adds to the names of tensors."""


def wrapper_hint(name: str) -> str:
    """Return how to publish a tensor without the wrapper that its name shows; empty if it shows
    none."""
    parts = name.split(".")
    found = next((part for part in parts if part in WRAPPERS), None)
    if found is None:
        return ""
    plain = ".".join(part for part in parts if part not in WRAPPERS)
    return (
        f". {WRAPPERS[found]} has added {found!r}: publish the state dict of the module inside, or "
        f"name the tensor {plain!r}"
    )


Revert = Callable[[Sequence[str]], Iterable[str]]
"""Function that returns the directory's names for some tensors of the ``state_dict()``."""


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Tensors that hold the same numbers under two sets of names."""

    state: tuple[str, ...]
    """Names of the group in the model's ``state_dict()``."""
    directory: tuple[str, ...]
    """Names in the model directory."""


def name_groups(state: Iterable[str], revert: Revert) -> list[NameGroup]:
    """Group the names of converted tensors; a name that is the same on both sides is omitted.

    Two tensors of the ``state_dict()`` are in one group if a tensor of the directory contains parts
    of both.
    """
    directory_names: dict[str, tuple[str, ...]] = {name: tuple(revert([name])) for name in state}
    groups: dict[str, list[str]] = {}
    for name, directory in directory_names.items():
        if directory == (name,):
            continue
        joined = [name]
        for group in {id(group): group for d in directory if (group := groups.get(d))}.values():
            joined = group + joined
        for member in joined:
            groups |= dict.fromkeys(directory_names[member], joined)
    distinct = {id(members): members for members in groups.values()}
    return [
        NameGroup(
            tuple(members), tuple(dict.fromkeys(d for m in members for d in directory_names[m]))
        )
        for members in distinct.values()
    ]
