"""What becomes of a page's links into the code on the site? Names of files: the code isn't there.

Knows Markdown's links, and nothing of what they lead to; tests/test_docs.py follows each.
"""

import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")
"""To what lies beside docs/, not in it."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """As mkdocs calls it, for each page."""
    return LINK.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2].removeprefix("../")
    said = text.strip("`")
    return f"`{path}`" if said in path else f"{text} (`{path}`)"
