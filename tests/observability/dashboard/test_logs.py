"""JSON log lines: fields, types and escaping."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tidegate.observability.logs import log_as_json

log = logging.getLogger("tidegate")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    before = (log.handlers[:], log.propagate, log.level)
    stream = io.StringIO()
    log_as_json("demo", stream)
    yield stream
    log.handlers[:], log.propagate = before[0], before[1]
    log.setLevel(before[2])


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_keys_of_a_log_message_become_typed_json_fields(written: io.StringIO) -> None:
    log.warning("engine=%s lost: %s", "engine-3", "it was silent")
    log.info("rollout=%d forks into %d, %s", 7, 8, "resampled")
    log.warning("stuck=%s name=%r waited_s=%.0f where=%r", "turn", 7, 61.25, "here")
    reported = lines(written)
    assert [each.pop("time")[-1] for each in reported] == ["Z"] * 3
    assert reported == [
        {
            "level": "warning",
            "run": "demo",
            "engine": "engine-3",
            "message": "engine=engine-3 lost: it was silent",
        },
        {
            "level": "info",
            "run": "demo",
            "rollout": 7,
            "message": "rollout=7 forks into 8, resampled",
        },
        {
            "level": "warning",
            "run": "demo",
            "stuck": "turn",
            "name": 7,
            "waited_s": 61.25,
            "where": "here",
            "message": "stuck=turn name=7 waited_s=61 where='here'",
        },
    ]


def test_a_literal_value_becomes_a_field_and_an_exception_one_line(written: io.StringIO) -> None:
    error = ValueError("first line\nsecond line")
    log.error("stuck=loop at 100%% done name=%r", "a callback", exc_info=error)
    (line,) = lines(written)
    assert (line["stuck"], line["name"]) == ("loop", "a callback")
    assert line["message"] == "stuck=loop at 100% done name='a callback'"
    assert "second line" in line["error"]


def test_logged_values_can_not_break_lines_or_replace_fields(
    written: io.StringIO,
) -> None:
    log.warning("run=%s level=%s engine=%s", "other", "none", 'a"\n{"engine": 1}')
    log.warning("waited_s=%s version=%s", float("nan"), object)
    log.warning({"no": "format"})
    first, second, third = lines(written)
    assert (first["run"], first["level"]) == ("demo", "warning")
    assert first["engine"] == 'a"\n{"engine": 1}'
    assert second["waited_s"] == "nan"
    assert third["message"] == "{'no': 'format'}"


def test_a_name_with_invalid_unicode_is_still_logged(written: io.StringIO) -> None:
    name = b"run-\xff".decode(errors="surrogateescape")
    args = ("path=%s version=%d", (name, 3), None)
    record = log.makeRecord("tidegate", logging.WARNING, __file__, 1, *args)
    log.handlers[0].handle(record)  # not pytest's handler, which could not report the captured text
    (line,) = lines(written)
    assert (line["path"], line["version"]) == ("run-\\udcff", 3)
