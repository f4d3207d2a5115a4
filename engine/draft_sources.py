"""Which source of guesses does a setting name? Makes it, and knows no turn.

Sources are told apart by a word, as it stands on a command line.
"""

from tidegate.engine.drafts import DraftSource
from tidegate.engine.lookup_drafts import LookupDrafts
from tidegate.errors import ConfigError


def open_drafts(name: str) -> DraftSource:
    """Make the source that ``name`` names.

    Raises:
        ConfigError: there is no such source.
    """
    if name == "lookup":
        return LookupDrafts()
    raise ConfigError(f"speculate must be 'lookup', got {name!r}")
