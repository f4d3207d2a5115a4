"""MkDocs hook that generates the pages under ``reference/`` from the code.

``mkdocs.yml`` loads it. Public names become mkdocstrings directives; settings, commands, metrics,
errors and wire messages become tables here, because their facts are values at run time. Nothing is
listed by hand. tests/test_docs_reference.py checks that no name is missing.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import struct
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union

import msgspec
import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import tidegate
from benchmarks.page import RESULTS, scheduling_tables
from tidegate import errors, transport
from tidegate.cli import app
from tidegate.observability.metrics.catalogue import METRICS
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.serving.gateway.requests import GatewayChatRequest, GatewayCompletionRequest
from tidegate.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    TokenSampling,
)
from tidegate.transport.message import Message
from tidegate.transport.messages import KvSpan, Prefill, Step

FOLDER = "reference"

TOPICS = {
    "runs": "Start a run",
    "orchestrator": "Runs, episodes, batches and settings",
    "policies": "Policies",
    "environments": "Environments",
    "serving": "HTTP servers",
    "integrations": "Integrations",
    "observability": "Logs and trackers",
    "transport": "Sampling on engines",
}
"""Titles of the API pages, by the top-level module that defines a public name."""

PROGRAMS = {
    "tidegate demo": "examples.async_grpo:parse_arguments",
    "tidegate engine": "tidegate.engine.worker:_parse",
    "python -m tidegate.engine.external.worker": "tidegate.engine.external.worker:_parse",
}
"""Parsers (argparse) of programs with options of their own, by the command that starts them."""

REQUESTS = {
    "`/v1/completions`": CompletionRequest,
    "`/v1/chat/completions`": ChatRequest,
    "`/inference/v1/generate`": GenerateRequest,
    "its `sampling_params`": TokenSampling,
    "gateway's completions": GatewayCompletionRequest,
    "gateway's chats": GatewayChatRequest,
}
"""Request bodies of the vLLM-compatible server and of the gateway, by the heading of a column."""

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):(`+|<code>)~?([\w.]+)(`+|</code>)")
"""A Sphinx role, in a docstring or as mkdocstrings renders it."""


def on_config(config: Any) -> Any:
    """Append the generated pages to the section ``Reference`` of the navigation."""
    for section in config["nav"]:
        if isinstance(section, dict) and "Reference" in section:
            section["Reference"] += sorted(pages(), key=lambda path: not path.endswith("index.md"))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site; MkDocs calls this once per build."""
    from mkdocs.structure.files import File

    for path, markdown in pages().items():
        files.append(File.generated(config, path, content=markdown))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Replace the Sphinx roles that mkdocstrings leaves in the HTML; MkDocs calls this per page."""
    targets = link_targets()

    def replaced(role: re.Match[str]) -> str:
        name = role[2]
        last_two = ".".join(name.split(".")[-2:])
        target = targets.get(name) or targets.get(last_two) or targets.get(last_two.split(".")[-1])
        code = f"<code>{name.rpartition('.')[2] if target else name}</code>"
        return f'<autoref optional identifier="{target}">{code}</autoref>' if target else code

    return ROLE.sub(replaced, html)


@functools.cache
def pages() -> dict[str, str]:
    """Return the Markdown of all generated pages by path, relative to docs/."""
    written = {
        **{f"api-{topic}.md": _api_page(topic, names) for topic, names in _by_topic().items()},
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "messages.md": messages_page(),
        "request-fields.md": request_fields_page(),
        "scheduling-results.md": scheduling_results_page(),
    }
    written["index.md"] = _index_page(written)
    return {f"{FOLDER}/{name}": text for name, text in written.items()}


# ---------------------------------------------------------------- public names


def public_objects() -> dict[str, Any]:
    """Return all names of ``tidegate.__all__`` with their objects."""
    return {name: getattr(tidegate, name) for name in tidegate.__all__}


def public_members(thing: type) -> list[str]:
    """Return the public members of a class that Tidegate defines, inherited ones included."""
    found: dict[str, None] = {}
    for base in thing.__mro__:
        if base.__module__.partition(".")[0] == "tidegate":
            fields = getattr(base, "__annotations__", {})
            found |= dict.fromkeys(name for name in (*fields, *vars(base)) if name[0] != "_")
    return [name for name in found if name != "model_config"]


@functools.cache
def link_targets() -> dict[str, str]:
    """Return the anchors that roles may link to, by ``Name`` and ``Name.member``."""
    found = {each.__name__: _path(each) for each in (*message_types(), *error_types())}
    for name, thing in public_objects().items():
        found[name] = _path(thing)
        for member in public_members(thing) if inspect.isclass(thing) else ():
            found[f"{name}.{member}"] = f"{_path(thing)}.{member}"
    return found


def _heading(thing: type) -> str:
    """Return a heading with the anchor that mkdocstrings would give it, for links to it."""
    return f"## {thing.__name__} {{#{_path(thing)}}}"


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _by_topic() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {topic: {} for topic in TOPICS}
    for name, thing in public_objects().items():
        if thing is not errors.TidegateError:  # on the page of errors
            found.setdefault(str(thing.__module__.split(".")[1]), {})[name] = thing
    return {topic: names for topic, names in found.items() if names}


def _api_page(topic: str, names: Mapping[str, Any]) -> str:
    lines = [f"# {_title(topic)}", ""]
    for name, thing in names.items():
        lines += [f"::: {_path(thing)}", f"    options: {{heading: {name}, toc_label: {name}}}", ""]
    return "\n".join(lines)


def _title(topic: str) -> str:
    return TOPICS.get(topic, topic.capitalize())


def _index_page(written: Mapping[str, str]) -> str:
    lines = ["# Reference", "", "Generated from the code."]
    for name, text in written.items():
        if not name.startswith("api-"):
            lines.append(f"- [{text.partition(chr(10))[0].strip('# ')}]({name})")
    lines.insert(3, "")
    for topic, names in _by_topic().items():
        lines += ["", f"## {_title(topic)}", "", "| `tidegate.` | |", "|---|---|"]
        for name, thing in names.items():
            first = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
            lines.append(f"| [`{name}`][{_path(thing)}] | {_cell(first)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- settings


def settings_records() -> dict[str, type[BaseModel]]:
    """Return the records of :class:`RunSettings` by their table's name; ``run`` is itself."""
    records: dict[str, type[BaseModel]] = {"run": RunSettings}
    for name, field in RunSettings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            records[f"run.{name}"] = field.annotation
    return records


def settings_page() -> str:
    """Return the page of all settings of ``serve()`` and of ``[run]`` in a TOML file."""
    lines = [
        "# Settings",
        "",
        "Arguments of `tidegate.serve`, and keys of `[run]` in a file for `tidegate run`. Each can "
        'be given by its name alone, `serve(pause_mode="abort")`, or in its record, '
        '`serve(weights=WeightSettings(pause_mode="abort"))`.',
    ]
    records = settings_records()
    for table, record in records.items():
        lines += ["", f"## `[{table}]` {record.__name__}", "", _prose(record.__doc__), ""]
        lines += ["| setting | type | range | default | |", "|---|---|---|---|---|"]
        documented = attribute_docstrings(record)
        for name, field in record.model_fields.items():
            if field.annotation not in records.values():
                limits = ", ".join(_limits(field)) or "-"
                row = [f"`{name}`", _code(type_name(field.annotation)), limits, _default(field)]
                lines.append(f"| {' | '.join(row)} | {_cell(documented.get(name, ''))} |")
    return "\n".join(lines) + "\n"


def type_name(hint: Any) -> str:
    """Return a type as a reader writes it: without modules, limits and validators."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(type_name(each) for each in arguments))
    if origin is Literal:
        return " | ".join(repr(each) for each in arguments)
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if origin is not None and arguments:
        name = getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join(type_name(each) for each in arguments)}]"
    return str(getattr(hint, "__name__", None) or hint)


def _limits(field: FieldInfo) -> Iterator[str]:
    """Yield the bounds of a field, also those of a part of its type such as ``int | None``."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for limit in (*field.metadata, *_nested_metadata(field.annotation)):
        for part in getattr(limit, "metadata", None) or (limit,):
            for name, sign in signs.items():
                if (bound := getattr(part, name, None)) is not None:
                    yield f"{sign} {bound}"
            if (pattern := getattr(part, "pattern", None)) is not None:
                yield _code(str(pattern))


def _nested_metadata(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for argument in typing.get_args(hint):
        yield from _nested_metadata(argument)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "-" if value is PydanticUndefined else _code(repr(value))


# ---------------------------------------------------------------- commands


def commands_page() -> str:
    """Return the page of all commands with their arguments and options."""
    lines = ["# Commands and options", "", "What `--help` of each command prints."]
    for name, command in commands().items():
        lines += ["", f"## `tidegate {name}`", "", _prose(command.help), ""]
        if rows := list(_parameter_rows(command)):
            lines += ["| option | type | default | |", "|---|---|---|---|", *rows]
        if command.epilog:
            lines += ["", "```text", command.epilog.removeprefix("\b\n"), "```"]
    for title, parser in PROGRAMS.items():
        lines += ["", f"## Options of `{title}`", "", "```text", program_help(parser), "```"]
    return "\n".join(lines) + "\n"


def commands() -> dict[str, Any]:
    """Return the click commands of ``tidegate`` that ``--help`` lists."""
    group: Any = typer.main.get_command(app)
    return {name: each for name, each in group.commands.items() if not each.hidden}


def _parameter_rows(command: Any) -> Iterator[str]:
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for parameter in command.params:
        if parameter.hidden or parameter.name not in hints:
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        if not names[0].startswith("-"):
            names = [parameter.metavar or parameter.name.upper()]
        hint = hints[parameter.name]
        kind = "flag" if hint.__origin__ is bool else _code(type_name(hint).removesuffix(" | None"))
        (info,) = (each for each in hint.__metadata__ if hasattr(each, "min"))
        limits = [f"{sign} {n}" for sign, n in (("≥", info.min), ("≤", info.max)) if n is not None]
        default = "-" if parameter.default in (None, "", False) else _code(str(parameter.default))
        row = [
            ", ".join(_code(each) for each in names),
            " ".join([kind, *limits]),
            "required" if parameter.required else default,
            _cell(info.help or ""),
        ]
        yield f"| {' | '.join(row)} |"


def program_help(parser: str) -> str:
    """Return what ``module:function`` prints for ``--help``, in lines of 100 characters."""
    module, _, function = parser.partition(":")
    parse: Callable[[Sequence[str]], Any] = getattr(importlib.import_module(module), function)
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    return printed.getvalue().rstrip()


# ---------------------------------------------------------------- metrics


def metrics_page() -> str:
    """Return the page of all Prometheus metrics."""
    lines = [
        "# Prometheus metrics",
        "",
        "The dashboard's address serves them under `/metrics`, see [Logging](../logging.md).",
        "",
        "| name | type | labels | |",
        "|---|---|---|---|",
    ]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "-"
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {_cell(each.help)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- errors


def error_types() -> list[type[BaseException]]:
    """Return all errors of :mod:`tidegate.errors`, each after its base class."""
    found: list[type[BaseException]] = []

    def walk(error: type[BaseException]) -> None:
        found.append(error)
        for each in error.__subclasses__():
            if each.__module__ == errors.__name__ and each not in found:
                walk(each)

    walk(errors.TidegateError)
    return found


def errors_page() -> str:
    """Return the page of all errors, as a tree and one by one."""
    tree = inspect.cleandoc(errors.__doc__ or "")
    lines = ["# Errors", "", "All are in `tidegate.errors`. Their tree:", "", "```text"]
    lines += [line for line in tree.splitlines() if re.match(r"(TidegateError$|[├│└])", line)]
    lines += ["```"]
    for error in error_types():
        bases = ", ".join(f"`{each.__name__}`" for each in error.__bases__)
        documented = attribute_docstrings(error)
        lines += ["", _heading(error), "", f"Bases: {bases}", "", _prose(error.__doc__)]
        lines += ["", *(f"- `{name}`: {_cell(text)}" for name, text in documented.items())]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- HTTP requests


def request_fields_page() -> str:
    """Return the page of what the HTTP servers do with each field of a request."""
    lines = [
        "# Fields of HTTP requests",
        "",
        "Fields of vLLM's and OpenAI's requests, at the [vLLM-compatible server]"
        "(../vllm-server.md) and at the [gateway](../agents.md). `yes`: honoured. `refused`: "
        "answered with 400 and the field's name, unless the value changes nothing. `-`, and all "
        "fields that are not listed: no effect.",
        "",
        f"| field | {' | '.join(REQUESTS)} |",
        f"|---|{'---|' * len(REQUESTS)}",
    ]
    names = dict.fromkeys(
        name for each in REQUESTS.values() for name in each.__struct_encode_fields__
    )
    for name in sorted(names):
        cells = [request_field_effect(each, name) for each in REQUESTS.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def request_field_effect(request: Any, field: str) -> str:
    """Return what a kind of request does with a field: ``yes``, ``refused`` or ``-``."""
    if field in request.REFUSED:
        return "refused"
    return (
        "yes" if field in request.__struct_encode_fields__ and field not in request.IGNORED else "-"
    )


# ---------------------------------------------------------------- wire messages


def message_modules() -> Iterator[Any]:
    """Yield the modules of :mod:`tidegate.transport` that define messages."""
    for module in pkgutil.iter_modules(transport.__path__):
        if module.name.endswith("messages") or module.name in (
            "attachments",
            "sampling",
            "scoring",
            "media",
        ):
            yield importlib.import_module(f"{transport.__name__}.{module.name}")


def message_types() -> list[type[msgspec.Struct]]:
    """Return all structs of the wire, in the order of their definition."""
    return [
        thing
        for module in message_modules()
        for thing in vars(module).values()
        if isinstance(thing, type)
        and issubclass(thing, msgspec.Struct)
        and thing.__module__ == module.__name__
    ]


def messages_page() -> str:
    """Return the page of all structs that travel between processes, with their fields."""
    lines = [
        "# Wire messages",
        "",
        "Fields of every message. How they are exchanged: [Wire protocol](../protocol.md). A "
        "message is a MessagePack map whose `kind` names it; a struct without a kind is part of a "
        "message, as a map or, where that is said, as an array of its fields in this order.",
    ]
    for message in message_types():
        info = msgspec.inspect.type_info(message)
        assert isinstance(info, msgspec.inspect.StructType)
        said = [f"`kind`: `{info.tag}`"] if info.tag is not None else []
        said += ["array"] if info.array_like else []
        sender = message.__module__.rpartition(".")[2].replace("_", " ")
        if not issubclass(message, Message) and info.tag is None:
            said.append("part of a message")
        lines += ["", _heading(message), "", f"*{sender}; {', '.join(said)}*", ""]
        lines += [_prose(message.__doc__), ""]
        documented = attribute_docstrings(message)
        hints = typing.get_type_hints(message, include_extras=True)
        if info.fields:
            lines += ["| field | type | default | |", "|---|---|---|---|"]
        for field in info.fields:
            default = "required" if field.required else _code(repr(_struct_default(field)))
            row = [f"`{field.encode_name}`", _code(type_name(hints[field.name])), default]
            lines.append(f"| {' | '.join(row)} | {_cell(documented.get(field.name, ''))} |")
    return "\n".join([*lines, *_example_lines()]) + "\n"


EXAMPLE_STEP = Step(
    seq=41,
    version=3,
    turns=struct.pack("<2I", 7, 9),
    token_ids=struct.pack("<2i", 1234, 2),
    logprobs=struct.pack("<2f", -0.5, -0.25),
    finish=bytes([0, 1]),
    prefills=[Prefill(9, 0, [KvSpan(2, 0, 16), KvSpan(3, 16, 20)])],
    started_us=1000,
    busy_us=250,
    queued_turns=0,
    free_blocks=100,
)


def _example_lines() -> Iterator[str]:
    """Yield a section with the bytes of a step message, a line for each field."""
    yield from ("", "## A step, byte by byte", "")
    yield (
        "Step 41 by weights 3: turn 7 samples token 1234 and continues; turn 9 samples stop token "
        "2, and its prefill spans a swap. First the map's size, then key and value of each field."
    )
    names = ["kind", *Step.__struct_fields__]
    encoded = [msgspec.msgpack.encode(name) for name in names]
    for index, name in enumerate(names):
        value = "step" if name == "kind" else getattr(EXAMPLE_STEP, name)
        encoded[index] += msgspec.msgpack.encode(value)
    head = msgspec.msgpack.encode(EXAMPLE_STEP)[: -sum(map(len, encoded))]
    shown = [f"{head.hex(' ')}    map of {len(names)}"]
    shown += [f"{each.hex(' ')}    {name}" for name, each in zip(names, encoded, strict=True)]
    yield from ("", "```text", *shown, "```")


def _struct_default(field: msgspec.inspect.Field) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory()  # type: ignore[operator]  # it has one of both


# ---------------------------------------------------------------- results


SCHEDULING_COLUMNS = {
    "efficiency": "unmasked trained tokens per second, over those of machines that are never idle; "
    "of the whole run after warm-up. Divide by `sync-colocated`'s for the speedup",
    "max age, mean age": "age of rollouts' oldest tokens in versions; the maximum includes warm-up",
    "mixed": "share of trained rollouts sampled by two or more versions",
    "masked": "share of trained tokens too old for the loss",
    "wasted": "share of generated tokens that were discarded",
    "length bias": "mean length of trained rollouts, over that of the tasks",
}


SCHEDULING_METHOD = (
    "## Method",
    "",
    "`python -m benchmarks.scheduling` runs the real orchestrator in virtual time over 12 "
    "simulated engines of 64 slots and a trainer on 4 machines, or over 16 machines that "
    "alternate. Engines take 8 ms + 0.12 ms per running turn for a token, prefill 25,000 "
    "tokens/s and pause for 2 s "
    "per update. A batch is 64 groups of 16 (256 groups in `large-batch`) with log-normal lengths, "
    "whose logarithms correlate by 0.5 within a group. Generation at peak rate needs 0.9 of the "
    "trainer's time.",
    "",
    "Not modelled: failures, lengths that change during training, and the wire "
    "(`python -m benchmarks.orchestrator` measures it).",
)


def scheduling_results_page() -> str:
    """Return the page of all recorded figures of ``python -m benchmarks.scheduling``."""
    rows = [json.loads(line) for line in (RESULTS / "scheduling.jsonl").read_text().splitlines()]
    lines = [
        "# Scheduling results",
        "",
        "From `benchmarks/results/scheduling.jsonl`. Policies: "
        "[Cost of scheduling policies](../scheduling.md). Brackets: the published event-driven "
        "model of the same machines (`benchmarks/scheduling/published.csv`), which has no overhead "
        "between engines and trainer; the difference is the orchestrator's cost.",
        "",
        "| column | meaning |",
        "|---|---|",
        *(f"| {column} | {meaning} |" for column, meaning in SCHEDULING_COLUMNS.items()),
        "",
        *scheduling_tables(rows),
        "",
        *SCHEDULING_METHOD,
    ]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- text


def attribute_docstrings(thing: type) -> dict[str, str]:
    """Return the docstrings under a class's attributes, of its bases in Tidegate too."""
    found: dict[str, str] = {}
    for base in reversed(thing.__mro__):
        if base.__module__.partition(".")[0] != "tidegate":
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = inspect.cleandoc(str(after.value.value))
                found |= dict.fromkeys(_assigned(statement), text)
    return found


def _assigned(statement: ast.stmt) -> Iterable[str]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Assign):
        yield from (each.id for each in statement.targets if isinstance(each, ast.Name))


def _prose(docstring: str | None) -> str:
    return _markdown(inspect.cleandoc(docstring or ""))


def _cell(text: str) -> str:
    """Return text for a cell of a table: one line, bars escaped."""
    return _markdown(" ".join(text.split())).replace("|", "\\|")


def _markdown(text: str) -> str:
    """Turn a docstring's double backticks into code; :func:`on_page_content` replaces roles."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")
