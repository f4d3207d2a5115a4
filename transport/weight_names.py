"""Groups of tensor names of a model: those of its directory, and those of its ``state_dict()``.

transformers converts some tensors while it loads a directory: the matrices of a mixture's experts
become one tensor, a fused projection becomes several, some are only renamed. A trainer may publish
by either names. The engine and the vLLM-compatible server both group them by this function, over
transformers' own conversions, which each of them passes in.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Revert = Callable[[Sequence[str]], Iterable[str]]
"""Returns the names that a directory has for some tensors of the ``state_dict()``."""


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Tensors that hold the same numbers by two sets of names."""

    state: tuple[str, ...]
    """The names in the ``state_dict()``."""
    directory: tuple[str, ...]
    """The names in the model directory."""


def name_groups(state: Iterable[str], revert: Revert) -> list[NameGroup]:
    """Group the names of tensors that are converted; a name that both sides have is left out.

    Two tensors of the ``state_dict()`` are of one group if a tensor of the directory has parts of
    both.
    """
    made: dict[str, tuple[str, ...]] = {name: tuple(revert([name])) for name in state}
    groups: dict[str, list[str]] = {}
    for name, directory in made.items():
        if directory == (name,):
            continue
        joined = [name]
        for other in {id(found): found for d in directory if (found := groups.get(d))}.values():
            joined = other + joined
        for member in joined:
            groups |= dict.fromkeys(made[member], joined)
    distinct = {id(members): members for members in groups.values()}
    return [
        NameGroup(tuple(members), tuple(dict.fromkeys(d for m in members for d in made[m])))
        for members in distinct.values()
    ]
