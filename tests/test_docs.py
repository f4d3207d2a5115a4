"""Tests that the documentation's links lead somewhere; test_docs_code.py runs its code."""

import re
from pathlib import Path

import pytest

import tidegate

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

WORDS_MAX = 32_500
"""Limit of words in docs/, so that the pages stay readable as a whole."""

MADE_BY_A_COMMAND = {"benchmarks.md"}
"""Pages that `make page` writes. The reference is not in docs/: the site's hooks generate it."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere_in_a_clone(page: Path) -> None:
    prose = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_file_that_is_named_exists(page: Path) -> None:
    for named in re.findall(r"\btests/[\w/]+\.py\b", page.read_text()):
        assert (ROOT / named).exists(), named


def test_the_package_gives_every_name_it_promises_and_no_other() -> None:
    for name in tidegate.__all__:
        assert getattr(tidegate, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        tidegate.no_such_name  # noqa: B018


def words_shown(page: Path) -> int:
    """Return the number of words that a page shows: without comments and the bars of tables."""
    shown = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    return sum(any(character.isalnum() for character in word) for word in shown.split())


def test_the_pages_have_fewer_words_than_their_limit() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in MADE_BY_A_COMMAND]
    assert sum(map(words_shown, pages)) < WORDS_MAX
