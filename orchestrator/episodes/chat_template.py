"""Chat template of a model: renders messages to text as ``transformers`` does.

:mod:`conversation` tokenizes the text and finds which tokens are in the context already. A template
is untrusted code, and runs in Jinja's sandbox.
"""

import datetime
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidegate.errors import ChatRefused, ModelError
from tidegate.orchestrator.episodes.tool_calls import is_harmony_template
from tidegate.transport.regular_files import read_regular

Message = Mapping[str, Any]
"""A message as in OpenAI's API: ``role``, ``content`` and so on."""

PLACEHOLDER = "tidegate-placeholder"
"""Text searched for in rendered messages, which no template writes by itself."""

LINE_SHOWN_MAX = 200
"""Characters of a template's line that an error shows."""

RENDER_CPU_S = 1.0
"""CPU seconds of one rendering: 16,384 messages take 0.25 s."""

SLOW_RENDER_CPU_S = 0.05
"""CPU seconds of a rendering from which on its template counts as slow."""

PRODUCT_ITEMS_MAX = 1_000_000
"""Characters or items of a text or list that a template multiplies, and bits of a power."""

TEMPLATE_NAMES = ("default", "tool_use")
"""Names tried in this order in a directory with several templates."""

log = logging.getLogger("tidegate")


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """Options for rendering a conversation as a prompt, with vLLM's names."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the model's message."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the model continues."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""


PLAIN_RENDERING = ChatRendering()


class ChatTemplate:
    """A model's chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: datetime.datetime,
        response_template: Mapping[str, Any] | None = None,
        *,
        model: str = "the model",
    ) -> None:
        """``now``: the template's date, the same in every rendering, because a date that changed
        during a conversation would change its beginning. ``response_template``: the tokenizer's
        specification by which ``transformers`` parses replies. ``model``: its name in warnings.

        Raises:
            ModelError: the source is not a template, or can't render a plain conversation.
        """
        environment = _environment(now)
        self._clock = environment.clock
        self.is_slow = False
        """Whether a rendering has been slow, so that even short messages are better rendered off an
        event loop."""
        self.source = source
        self.response_template = response_template
        self.is_harmony = is_harmony_template(source)
        self.separates_reasoning = "reasoning_content" in source or self.is_harmony
        """Whether messages have their reasoning apart from the content."""
        self._special_tokens = dict(special_tokens)
        self._model = model
        self._is_warned = False
        """Whether the log says that the template ignores tools."""
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._shows_tools = "tools" in variables
            self._beginning, self.end_of_turn = self._around_reply()
        except (jinja2.TemplateError, ChatRefused) as error:
            raise ModelError(
                f"the model's chat template can't be used: {error}; correct chat_template.jinja in "
                "the model directory"
            ) from error

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        rendering: ChatRendering = PLAIN_RENDERING,
    ) -> str:
        """Return the text that the model continues.

        Raises:
            ChatRefused: the template raised for these messages, or does not show the last one,
                which is to be continued.
        """
        if tools and not self._shows_tools:
            self._warn_of_tools()
        text = self.render(
            messages,
            tools,
            add_generation_prompt=rendering.add_generation_prompt,
            options=rendering.names,
        )
        if not rendering.continue_final_message:
            return text
        content = messages[-1].get("content")
        ending = content.strip() if isinstance(content, str) else ""
        start = text.rfind(ending) if ending else -1
        if start < 0:
            raise ChatRefused(
                "continue_final_message continues the last message's text, and the chat template "
                f"does not show {ending!r:.80} at the end; end with a message that has text"
            )
        # Templates may trim a message: keep the spaces after it only if the template does.
        whole = str(content).lstrip()
        return text[: start + len(whole if text.startswith(whole, start) else ending)]

    def _warn_of_tools(self) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        log.warning(
            "the chat template of %s ignores tools: requests have them, and prompts do not. "
            "Describe the tools in a system message, or give the model directory a "
            "chat_template.jinja that reads `tools`",
            self._model,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, up to where the model begins to generate.

        ``options`` are further variables of the template, such as ``enable_thinking``.

        Raises:
            ChatRefused: the template raised for these messages; the error says why.
        """
        began_s = self._clock.start()
        try:
            return self._template.render(
                messages=_with_thinking(messages) if self.is_harmony else messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(options or {}),  # a name given twice raises TypeError
            )
        except Exception as error:  # the template's code may raise anything
            why = f"{type(error).__name__}: {error}{self._place_of(error)}"
            raise ChatRefused(f"the chat template refuses these messages: {why}") from error
        finally:
            self.is_slow |= time.thread_time() - began_s > SLOW_RENDER_CPU_S

    def _place_of(self, error: Exception) -> str:
        """Return the template's line that raised, which shows the field that it reads."""
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == "<template>"
        ]
        if not lines:
            return ""
        line = self._template.get_corresponding_lineno(lines[-1])
        text = self.source.splitlines()[line - 1].strip()
        return f", in line {line} of the template: {text[:LINE_SHOWN_MAX]}"

    def may_write(self, system_message: str) -> bool:
        """Whether conversations without a system message may be rendered with this one."""
        return system_message.strip() in self._beginning

    def _around_reply(self) -> tuple[str, str]:
        """Return the text before an assistant's message in a conversation without a system
        message, and the text after one, such as ``<|im_end|>\\n``."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACEHOLDER},
        ]
        text = self.render(messages, add_generation_prompt=False)
        beginning, found, end = text.rpartition(PLACEHOLDER)
        if not found:
            raise ChatRefused("it does not show an assistant message's content")
        return beginning, end


@lru_cache(maxsize=8)
def read_chat_template(path: Path) -> ChatTemplate:
    """Read a model directory's template: chat_template.jinja, or in tokenizer_config.json.

    Raises:
        ModelError: there is none, or it can't be used.
    """
    config = _read_config(path / "tokenizer_config.json")
    file = path / "chat_template.jinja"
    source = read_regular(file).decode() if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = next((named[name] for name in TEMPLATE_NAMES if name in named), None)
    if not isinstance(source, str):
        raise ModelError(
            f"{path} has no chat template; generate from token_ids or text that you append, or "
            f"add a chat_template.jinja"
        )
    replies = config.get("response_template")
    if replies is not None:
        _check_response_template(replies, path)
    specials = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    now = datetime.datetime.now().astimezone()
    return ChatTemplate(source, specials, now, replies, model=str(path))


def _check_response_template(template: Any, path: Path) -> None:
    """Raise ModelError unless ``transformers`` can parse replies by this response template."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"response_template in {path / 'tokenizer_config.json'} can't be used: {error}"
        ) from None


def _with_thinking(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the name that gpt-oss' template has for reasoning. The template takes
    either reasoning or content beside calls, so content is added to the reasoning."""
    renamed: list[Message] = []
    for message in messages:
        thinking, content = message.get("reasoning_content"), message.get("content")
        if not thinking:
            renamed.append(message)
        elif content and message.get("tool_calls"):
            renamed.append({**message, "thinking": f"{thinking}\n\n{content}", "content": ""})
        else:
            renamed.append({**message, "thinking": thinking})
    return renamed


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(read_regular(path))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{path} can't be read ({error}); correct it, or download the model again"
        ) from None
    return config if isinstance(config, dict) else {}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` tag, by which templates mark the assistant's text; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RenderClock(threading.local):
    """CPU time at which the rendering that runs in this thread is over its limit."""

    deadline_s = float("inf")

    def start(self) -> float:
        """Begin a rendering; return the thread's CPU time."""
        now_s = time.thread_time()
        self.deadline_s = now_s + RENDER_CPU_S
        return now_s

    def check(self) -> None:
        """Raise TemplateError if the rendering is over its limit."""
        if time.thread_time() > self.deadline_s:
            raise jinja2.TemplateError(
                f"rendering took more than {RENDER_CPU_S:g} s; send less, or correct the template"
            )


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on a rendering's time, and on what a template multiplies; errors
    keep the traceback of the compiled template."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = _RenderClock()
        self.filters[_CHECKED] = self._checked

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Call a function or macro for a template."""
        self.clock.check()
        return super().call(*arguments, **options)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Multiply or raise to a power for a template."""
        if operator == "**":
            size = getattr(left, "bit_length", int)() * right if isinstance(right, int) else 0
        else:
            times, items = (left, right) if isinstance(left, int) else (right, left)
            size = times * len(items) if isinstance(times, int) and hasattr(items, "__len__") else 0
        if size > PRODUCT_ITEMS_MAX:
            raise jinja2.TemplateError(f"{operator} may make {PRODUCT_ITEMS_MAX} items, got {size}")
        return super().call_binop(context, operator, left, right)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is being handled. Jinja would rewrite its traceback, whose frames
        then refer to each other, and to the messages, until the garbage collector runs."""
        raise

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parse a template, and have each of its loops check the time."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(
                loop.iter, _CHECKED, [], [], None, None, lineno=loop.lineno
            )
        tree.set_environment(self)
        return tree

    def _checked(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.clock.check()
            yield item


_CHECKED = "checked_by_tidegate"
"""Filter of the items of every loop."""


def _environment(now: datetime.datetime) -> _Environment:
    """Make the Jinja environment that ``transformers`` gives to templates."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    dump: Callable[..., str] = _to_json
    environment.filters["tojson"] = dump
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = now.strftime
    return environment


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Encode without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
