"""API keys from environment variables and private files, for other engines' servers and our own.

A key is never part of a URL or a command line, because those are logged, shown by ``ps``, and
recorded with a run.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tidegate.errors import ConfigError

VARIABLE = "TIDEGATE_ENGINE_KEY"
"""Environment variable that holds the key of all external engines' servers."""

FILE_VARIABLE = "TIDEGATE_ENGINE_KEY_FILE"
"""Environment variable that names a file: one key for all servers, or a line ``URL KEY`` for
each."""

OWN_KEY_VARIABLE = "TIDEGATE_SERVER_KEY"
"""Environment variable that holds the API key of our vLLM-compatible server; with ``_FILE``
appended, names its file."""

CONTROL_TOKEN_VARIABLE = "TIDEGATE_CONTROL_TOKEN"
"""Environment variable that holds the token of that server's pause and weight endpoints; with
``_FILE`` appended, names its file."""

TENANT_KEYS_VARIABLE = "TIDEGATE_TENANT_KEYS"
"""With ``_FILE`` appended, the environment variable that names a file of the Tinker server's API
keys: a line ``NAME KEY`` for each tenant."""

DASHBOARD_TOKEN_VARIABLE = "TIDEGATE_DASHBOARD_TOKEN"
"""Environment variable that holds the dashboard's token; not a setting, because settings are
recorded."""

FILE_BYTES_MAX = 65_536

HINT = (
    f"put the key into the environment variable {VARIABLE}, or into a file that {FILE_VARIABLE} "
    f"names, with a line `URL KEY` for each server that has its own"
)

_KEY = re.compile(r"[!-~]{1,4096}", re.ASCII)


def refuse_secrets(url: str) -> None:
    """Check that a URL carries no key.

    Raises:
        ConfigError: the URL has credentials or a query. The error does not repeat them.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, has_secrets = parts.hostname, "@" in parts.netloc or bool(parts.query)
    except ValueError:  # an invalid URL: the connection attempt reports it, and repeats the URL
        host, has_secrets = None, "@" in url or "?" in url
    if has_secrets:
        which = "an engine's url" if host is None else f"the engine's url with the host {host}"
        raise ConfigError(f"{which} has a password or a query in it, and urls are logged; {HINT}")


def key_of(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key for the server at ``url``; None if none is configured.

    Raises:
        ConfigError: a key file is unusable, readable by others, or malformed.
    """
    key, path = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if key and path:
        raise ConfigError(f"{VARIABLE} and {FILE_VARIABLE} are both set; omit one of them")
    if path:
        return _find(_read(Path(path)), url, path)
    return _checked(key.strip(), VARIABLE) if key else None


def own_key(variable: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key in an environment variable, or in the file that ``VARIABLE_FILE`` names.

    Raises:
        ConfigError: both are set; the file is unusable or readable by others; it holds no key.
    """
    key, path = environment.get(variable), environment.get(f"{variable}_FILE")
    if key and path:
        raise ConfigError(f"{variable} and {variable}_FILE are both set; omit one of them")
    if not path:
        return _checked(key.strip(), variable) if key else None
    lines = _read(Path(path), f"{variable}_FILE", "it holds one key, in one line")
    if len(lines) != 1 or len(lines[0]) != 1:
        raise ConfigError(
            f"{path} of {variable}_FILE must hold one key in one line, got {len(lines)} lines"
        )
    return _checked(lines[0][0], path)


def tenant_keys(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the names of the Tinker server's tenants by their API keys; empty if it has none.

    They are in the file that TIDEGATE_TENANT_KEYS_FILE names; or the only key is our server's own,
    of :func:`own_key`.

    Raises:
        ConfigError: the file is unusable, readable by others or malformed, or both are set.
    """
    variable = f"{TENANT_KEYS_VARIABLE}_FILE"
    path, single = environment.get(variable), own_key(OWN_KEY_VARIABLE, environment)
    if path and single:
        raise ConfigError(f"{variable} and {OWN_KEY_VARIABLE} are both set; omit one of them")
    if not path:
        return {single: "tenant"} if single else {}
    hint = "it holds a line NAME KEY for each tenant"
    keys: dict[str, str] = {}
    for fields in _read(Path(path), variable, hint):
        if len(fields) != 2 or fields[0] in keys.values() or fields[1] in keys:
            raise ConfigError(
                f"{path} of {variable} has a line of {len(fields)} words, or a name or key twice; "
                f"{hint}"
            )
        keys[_checked(fields[1], path)] = fields[0]
    if not keys:
        raise ConfigError(f"{path} of {variable} holds no key; {hint}")
    return keys


def _read(path: Path, variable: str = FILE_VARIABLE, hint: str = HINT) -> list[list[str]]:
    """Return a private file's lines, split into words, without comments."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{variable} names {path}, which is no file of keys; {hint}")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"others may read the keys in {path} (mode {stat.S_IMODE(status.st_mode):03o}); "
                f"remove their access: chmod go-rwx {path}"
            )
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"can't read {path} of {variable}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds something else than keys; {hint}") from error
    lines = (line.split() for line in text.splitlines())
    return [fields for fields in lines if fields and not fields[0].startswith("#")]


def _find(lines: list[list[str]], url: str, path: str) -> str | None:
    key = None
    for fields in lines:
        if len(fields) == 1 and len(lines) == 1:
            return _checked(fields[0], path)
        if len(fields) != 2:
            raise ConfigError(f"{path} has a line of {len(fields)} words; {HINT}")
        if _normalized(fields[0]) == _normalized(url):
            key = _checked(fields[1], path)
    return key


def _normalized(url: str) -> str:
    """Normalise a server's URL, so that different spellings compare equal."""
    address = url.partition("+")[2] if re.match(r"[a-z0-9_-]+\+https?:", url) else url
    return address.partition("#")[0].rstrip("/").lower()


def _checked(key: str, source: str) -> str:
    """Check a key: a header allows no line ends, spaces or non-ASCII characters."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the key in {source} must be one or more printable ASCII characters without spaces; "
            "it is empty, or has another character"
        )
    return key
