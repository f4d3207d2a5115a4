"""Suggestions for unknown names in error messages, by ``difflib``'s edit similarity.

The settings and `tidegate run`'s TOML parser use them.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name as a question, or list all if none is similar."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(sorted(names))}" if names else "there are none"
