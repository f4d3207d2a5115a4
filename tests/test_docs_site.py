"""Tests that links into the code lead, on the site, to pages that show it."""

import re
from pathlib import Path

import pytest

from tests.site_hooks import HOOKS, hook

DOCS = HOOKS.parent


def on_the_site(markdown: str, uri: str = "page.md") -> str:
    return str(hook("code_links").with_links(markdown, uri))


def test_a_link_to_code_leads_to_its_page_and_others_stay() -> None:
    assert on_the_site("see [core.py](../orchestrator/core/core.py).") == (
        "see [core.py](code/orchestrator/core/core.py.md)."
    )
    assert on_the_site("[pauses](../../cli/run.py#L3)", "decisions/one.md") == (
        "[pauses](../code/cli/run.py.md)"
    )
    for stays in (
        "[a page](concepts.md#keep)",
        "[elsewhere](https://ui.perfetto.dev)",
        "![it](demo.png)",
    ):
        assert on_the_site(stays) == stays
    assert on_the_site("[a page](../concepts.md)", "decisions/one.md") == "[a page](../concepts.md)"


def test_a_files_page_shows_it_and_the_search_leaves_it_out() -> None:
    shown = hook("code_links").source_page("cli/__main__.py")
    assert "search:\n  exclude: true" in shown
    assert (DOCS.parent / "cli" / "__main__.py").read_text() in shown


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_every_linked_file_has_a_page_and_no_link_leaves_the_site(page: Path) -> None:
    uri = str(page.relative_to(DOCS))
    text = page.read_text()
    for path in hook("code_links").linked_files(uri, text):
        assert hook("code_links").source_page(path)
    above = "../" * (uri.count("/") + 1)
    assert re.findall(rf"\]\({re.escape(above)}[^)]*\)", on_the_site(text, uri)) == []
