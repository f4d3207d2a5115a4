"""MkDocs hook that shows on the site each file of the repository that a page links to.

Pages link to files outside docs/ by relative paths, which work in a clone. ``mkdocs.yml`` loads
this hook, which adds a page ``code/PATH`` for each such file and points the links there.
tests/test_docs_site.py checks that no link is omitted.
"""

import os.path
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")
"""Markdown links to files above the page's folder, without their anchors."""

LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".cpp": "cpp", ".md": "markdown"}
"""Languages for the highlighting, by file extension; others are shown as text."""


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file that is linked to; MkDocs calls this once per build."""
    from mkdocs.structure.files import File

    texts = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    for path in sorted({path for uri, text in texts for path in linked_files(uri, text)}):
        page = f"code/{path}.md"
        files.append(File.generated(config, page, content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of one page to the pages of the files; MkDocs calls this for each."""
    uri = page.file.src_uri
    return markdown if uri.startswith("code/") else with_links(markdown, uri)


def with_links(markdown: str, uri: str) -> str:
    """Return the Markdown of the page ``uri`` with links that work on the site."""
    up = "../" * uri.count("/")

    def replaced(link: re.Match[str]) -> str:
        path = _outside(uri, link[2])
        return link[0] if path is None else f"[{link[1]}]({up}code/{path}.md)"

    return LINK.sub(replaced, markdown)


def linked_files(uri: str, markdown: str) -> set[str]:
    """Return the files outside docs/ that a page links to, relative to the repository."""
    paths = (_outside(uri, link[2]) for link in LINK.finditer(markdown))
    return {path for path in paths if path is not None}


def source_page(path: str) -> str:
    """Return the page that shows a file, or lists a folder; the search leaves it out."""
    shown = ROOT / path
    if shown.is_dir():
        text = "\n".join(sorted(each.name for each in shown.iterdir()))
    else:
        text = shown.read_text()
    language = LANGUAGES.get(shown.suffix, "text")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    return f"{head}``````{language}\n{text.rstrip()}\n``````\n"


def _outside(uri: str, link: str) -> str | None:
    """Return the link's target relative to the repository, or None if it is under docs/."""
    path = os.path.normpath(os.path.join(os.path.dirname(uri), link))
    return path.removeprefix("../") if path.startswith("../") else None
