"""Finding of the doctor: a check's verdict, explanation and remedy.

:mod:`findings` creates them, and `tidegate doctor` prints them.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Severity of a finding. Only ``FAIL`` sets the command's exit status to 1."""

    OK = "ok"
    NOTE = "note"
    """Not measurable, or a matter of preference."""
    WARN = "warn"
    """Training works, but worse or with fewer features."""
    FAIL = "fail"
    """Tokens would be trained on with wrong log-probs or wrong weights, or can't be obtained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of the check; the same in every report."""
    verdict: Verdict
    says: str
    """What was found."""
    remedy: str = ""
    """What to do; empty if nothing is necessary."""
