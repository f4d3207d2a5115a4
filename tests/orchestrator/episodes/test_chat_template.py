"""Limits of chat templates, which are untrusted code; and tools that a template ignores."""

import datetime
import logging

import pytest

from tests.orchestrator.episodes.chat_templates import TEMPLATES
from tests.orchestrator.episodes.talking import TOOLS
from tidegate.errors import ChatRefused, ModelError
from tidegate.orchestrator.episodes.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSION = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
)
CHAT = [{"role": "user", "content": "q"}] * 3


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, datetime.datetime(2026, 1, 1))


def hostile(body: str) -> ChatTemplate:
    """Return a template that does harm to a long conversation only."""
    return template(PLAIN + "{% if messages | length > 2 %}" + body + "{% endif %}")


@pytest.mark.parametrize("body", [LOOPS, RECURSION])
def test_a_template_that_does_not_end_is_refused_and_counts_as_slow(body: str) -> None:
    chat = hostile(body)
    assert chat.render(CHAT[:1]) == "user:q<|im_end|>"
    assert not chat.is_slow
    with pytest.raises(ChatRefused, match=r"rendering took more than 1 s.*in line 1 of the"):
        chat.render(CHAT)
    assert chat.is_slow
    with pytest.raises(ModelError, match="rendering took more than 1 s"):
        template(PLAIN + body)


@pytest.mark.parametrize(
    "body", ["{{ 'x' * 5000000000 }}", "{{ 5000000000 * ['x'] }}", "{{ 10 ** 5000000000 }}"]
)
def test_a_template_multiplies_no_text_into_gigabytes(body: str) -> None:
    with pytest.raises(ChatRefused, match="may make 1000000 items"):
        hostile(body).render(CHAT)


def test_loops_and_products_of_templates_are_otherwise_those_of_jinja() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}"
        "{{ ',' if not loop.last }}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 2}.items() %}{{ k * v }}{{ v ** 10 }}{% endfor %}"
        "{% for x in missing %}{% endfor %}<|im_end|>"
    )
    assert template(source).render(CHAT) == "1/3q,2/3q,3/3qaa1024<|im_end|>"


def test_tools_that_a_template_ignores_are_reported_once_with_the_model_s_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = datetime.datetime(2026, 1, 1)
    ignores = ChatTemplate(TEMPLATES["smollm2"], {}, now, model="models/small")
    assert ignores.prompt(CHAT, TOOLS) == ignores.prompt(CHAT)
    ignores.prompt(CHAT, TOOLS)
    [warning] = caplog.messages
    assert "template of models/small ignores tools" in warning
    assert "Describe the tools in a system message" in warning


LLAMA31_BEGINNING = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
)


@pytest.mark.parametrize("source", [TEMPLATES["chatml"], LLAMA31_BEGINNING + PLAIN])
def test_a_template_that_shows_tools_is_not_reported(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tidegate"):
        assert '"add"' in template(source).prompt(CHAT, TOOLS)
    assert not caplog.messages
