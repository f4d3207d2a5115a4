"""What is one thing found out about an engine? How bad it is, what it is, what helps."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad a finding is. Only ``FAIL`` makes the command's status 1."""

    OK = "ok"
    NOTE = "note"
    """Could not be measured, or is a matter of taste."""
    WARN = "warn"
    """Training works, but worse or with less than it might."""
    FAIL = "fail"
    """What is trained on would not be what was sampled, or can't be had at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line for people and scripts."""

    check: str
    """Which question it answers; the same in every report."""
    verdict: Verdict
    says: str
    remedy: str = ""
    """What to do; empty where nothing need be."""
