"""MkDocs hook that replaces links into the code by file names, because the site has no code.

``mkdocs.yml`` loads it; tests/test_docs.py checks that every link leads to a file.
"""

import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")
"""Markdown links to files outside docs/."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the links of one page; MkDocs calls this for each."""
    return LINK.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2].removeprefix("../")
    said = text.strip("`")
    return f"`{path}`" if said in path else f"{text} (`{path}`)"
