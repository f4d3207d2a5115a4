"""Grammars of `structured_outputs`, whatever characters a client writes in them."""

from typing import Any

import pytest

from tidegate.serving.openai.requests import Sampling


@pytest.mark.parametrize(
    ("wanted", "lark"),
    [
        ({"regex": "a/b"}, r"start: /a\/b/"),
        ({"regex": r"a\/b"}, r"start: /a\/b/"),
        ({"regex": r"a\\/b"}, r"start: /a\\\/b/"),
        ({"regex": r"\d[^\w.]\\d\s"}, r"start: /[0-9][^[0-9A-Za-z_].]\\d\s/"),
        ({"choice": ["yes", 'a "b"']}, r'start: "yes" | "a \"b\""'),
    ],
    ids=["a slash", "an escaped one", "one after an escaped backslash", "ASCII", "choices"],
)
def test_what_is_wanted_becomes_a_grammar_that_ends_where_it_ends(
    wanted: dict[str, Any], lark: str
) -> None:
    assert Sampling(structured_outputs=wanted).grammar == lark
