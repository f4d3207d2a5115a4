"""Which known name was probably meant by an unknown one? For errors; it knows no names itself."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say the nearest known name, or all of them where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(sorted(names))}" if names else "there are none"
