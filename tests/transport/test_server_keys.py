"""Tests that a server's key is found where it was put, and refused if others could read it."""

from pathlib import Path

import pytest

from tidegate.engine.external.worker import open_adapter
from tidegate.environments.started_worker import child_environment
from tidegate.errors import ConfigError
from tidegate.transport.server_keys import (
    DASHBOARD_TOKEN_VARIABLE,
    FILE_VARIABLE,
    VARIABLE,
    key_of,
    refuse_secrets,
    tenant_keys,
)

URL = "http://host:8000"


def keys_in(directory: Path, text: str, mode: int = 0o600) -> dict[str, str]:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(mode)
    return {FILE_VARIABLE: str(path)}


def test_a_key_of_the_environment_is_for_all_servers() -> None:
    assert key_of(URL, {VARIABLE: "sesame\n"}) == "sesame"
    assert key_of(URL, {}) is None


def test_a_file_has_one_key_for_all_or_one_for_each(tmp_path: Path) -> None:
    assert key_of(URL, keys_in(tmp_path, "sesame\n")) == "sesame"
    each = keys_in(tmp_path, f"# two\nvllm+{URL}/ one\n\nhttps://other two\n")
    assert key_of(URL, each) == "one"
    assert key_of("https://OTHER", each) == "two"
    assert key_of("http://other", each) is None


@pytest.mark.parametrize("text", ["a b c", "one\ntwo", "http://host:8000 s\x01same", "sésame"])
def test_a_file_that_says_what_can_not_be_is_refused_and_not_repeated(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        key_of(URL, keys_in(tmp_path, text))
    assert text not in str(error.value)


def test_a_file_that_others_may_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod go-rwx"):
        key_of(URL, keys_in(tmp_path, "sesame", 0o640))
    with pytest.raises(ConfigError, match="can't read"):
        key_of(URL, {FILE_VARIABLE: str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="both set"):
        key_of(URL, {VARIABLE: "sesame", FILE_VARIABLE: "file"})


@pytest.mark.parametrize(
    "url", ["http://me:sesame@host:1", "http://host:1/?key=sesame", "me:sesame@host:1"]
)
def test_a_key_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="host host") as error:
        refuse_secrets(url)
    assert "sesame" not in str(error.value)
    refuse_secrets("host:8000")
    refuse_secrets(f"vllm+{URL}")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:sesame@host:1",
        "vlm+http://me:sesame@host:1",
        "vllm+http://me:sesame@host:1#weights=http",
        "vllm+me:sesame@host:1",
        "sglang+http://me:sesame@[host:1",
        "sglang+http://me:sesame@host:1#wights=gloo",
    ],
)
def test_an_adapter_repeats_no_key_whatever_else_is_wrong_with_its_url(
    tmp_path: Path, url: str
) -> None:
    with pytest.raises(ConfigError) as error:
        open_adapter(url, tmp_path)
    assert "sesame" not in str(error.value)


def test_processes_of_environments_are_not_given_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, FILE_VARIABLE, DASHBOARD_TOKEN_VARIABLE):
        monkeypatch.setenv(name, "sesame")
    assert "sesame" not in child_environment().values()


def test_tenants_keys_are_the_lines_of_a_file_or_the_servers_own_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# two tenants\nalice tml-1\nbob tml-2\n")
    file.chmod(0o600)
    named = {"TIDEGATE_TENANT_KEYS_FILE": str(file)}
    assert tenant_keys(named) == {"tml-1": "alice", "tml-2": "bob"}
    assert tenant_keys({"TIDEGATE_SERVER_KEY": "tml-3"}) == {"tml-3": "tenant"}
    assert tenant_keys({}) == {}
    with pytest.raises(ConfigError, match="are both set"):
        tenant_keys(named | {"TIDEGATE_SERVER_KEY": "tml-3"})


@pytest.mark.parametrize("text", ["alice\n", "a tml-1\na tml-2\n", "a tml-1\nb tml-1\n", ""])
def test_a_file_of_tenants_keys_that_is_ambiguous_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="a line NAME KEY for each tenant"):
        tenant_keys({"TIDEGATE_TENANT_KEYS_FILE": str(file)})
