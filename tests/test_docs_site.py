"""Tests that no page of the site links into the code, which is not part of it."""

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def as_on_the_site(markdown: str) -> str:
    spec = importlib.util.spec_from_file_location("code_links", DOCS / "hooks" / "code_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = module.on_page_markdown(markdown, page=None, config=None, files=None)
    assert isinstance(said, str)
    return said


def test_a_link_to_code_becomes_its_files_name_and_others_stay() -> None:
    assert as_on_the_site("see [core.py](../orchestrator/core/core.py).") == (
        "see `orchestrator/core/core.py`."
    )
    assert as_on_the_site("[pauses](../orchestrator/fleet/pausing.py#L3)") == (
        "pauses (`orchestrator/fleet/pausing.py`)"
    )
    stays = "[a page](concepts.md#keep), [elsewhere](https://ui.perfetto.dev), ![it](demo.png)"
    assert as_on_the_site(stays) == stays


def test_no_page_has_one_left() -> None:
    left = {
        page.name: found
        for page in DOCS.glob("*.md")
        if (found := re.findall(r"\]\(\.\./[^)]*\)", as_on_the_site(page.read_text())))
    }
    assert left == {}
