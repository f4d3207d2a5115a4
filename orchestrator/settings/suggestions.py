"""Wording of errors about settings: what a value must be, and the name that was probably meant."""

import difflib
from collections.abc import Iterable


def worded(message: str) -> str:
    """Turn pydantic's "Input should be …" into "must be …", which callers put after a setting's
    name."""
    return message.replace("Input should be", "must be", 1)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name as a question, or list all if none is similar."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(sorted(names))}" if names else "there are none"
