"""CURVE keys: creates and reads key files, and applies the keys to ZeroMQ sockets.

`tidegate keys` creates them; every socket that is reachable from other hosts uses them. CURVE
(Curve25519, in libzmq's own handshake) encrypts connections and authenticates both ends.
:mod:`zap_authenticator` decides which public keys may connect. Files are in the certificate format
of ``zmq.auth`` and CZMQ.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from tidegate.errors import ConfigError
from tidegate.transport.zeromq import Socket

KEY_BYTES = 32
"""Length of a public or secret key; 40 characters of Z85 in a file."""

KEY_FILE_BYTES_MAX = 4096
"""Maximum size of a key file, far more than a key and its comment take."""

ENGINE_DEFAULT = "engine"

_ALLOWED = "engines"
"""Name of the directory that holds the public keys allowed to connect."""

_ORCHESTRATOR_PUBLIC = "orchestrator.key"
_ORCHESTRATOR_SECRET = "orchestrator.key_secret"
_ENGINE_SECRET = "engine.key_secret"

_ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class OrchestratorKeys:
    """Keys of the listening end."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Path | frozenset[bytes]
    """Allowed clients: a directory, whose ``*.key`` files hold the allowed public keys; or the keys
    themselves, for keys that are never written to disk."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Keys of a connecting end."""

    public: bytes
    secret: bytes = field(repr=False)
    orchestrator: bytes
    """Public key of the orchestrator that this end accepts."""


# ------------------------------------------------------------ key creation


def make_keys(directory: Path, engine: str = ENGINE_DEFAULT) -> Path:
    """Create an engine's keys, and the orchestrator's if there are none yet; replace nothing.

    Returns the directory to copy to the engine's host. Any number of engines may share one set of
    keys; an engine with keys of its own can be revoked individually.

    Raises:
        ConfigError: that engine has keys already, or the files cannot be written.
    """
    _check_curve()
    if not _ENGINE_NAME.fullmatch(engine) or engine == _ALLOWED:
        raise ConfigError(
            f"{engine!r} can't name an engine's keys: use letters, digits, '_' and '-', "
            f"and not {_ALLOWED!r}"
        )
    own = directory / engine
    if own.exists() or _allowed_file(directory, engine).exists():
        raise ConfigError(
            f"{own} exists already, and keys are not replaced; choose another name (--engine), "
            f"or remove the directory and its copies"
        )
    try:
        _write_keys(directory, own, engine)
    except OSError as error:
        raise ConfigError(f"can't write keys into {directory}: {error}") from error
    return own


def _write_keys(directory: Path, own: Path, engine: str) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / _ALLOWED).mkdir(mode=0o700, exist_ok=True)
    if not (directory / _ORCHESTRATOR_SECRET).exists():
        public, secret = zmq.curve_keypair()
        comment = "The orchestrator's {}. Anyone with the secret key can pose as it: keep it here."
        _write(directory / _ORCHESTRATOR_PUBLIC, comment.format("public key"), public)
        _write(directory / _ORCHESTRATOR_SECRET, comment.format("keys"), public, secret)
    orchestrator = read_orchestrator_keys(directory).public
    public, secret = zmq.curve_keypair()
    own.mkdir(mode=0o700)
    _write(own / _ORCHESTRATOR_PUBLIC, "The orchestrator that this engine talks to.", orchestrator)
    _write(
        own / _ENGINE_SECRET,
        "An engine's keys. Anyone who has them may connect as this engine.",
        public,
        secret,
    )
    comment = f"The public key of {engine!r}. Delete this file to refuse the engine."
    _write(_allowed_file(directory, engine), comment, public)


def _allowed_file(directory: Path, engine: str) -> Path:
    return directory / _ALLOWED / f"{engine}.key"


def _write(path: Path, comment: str, public: bytes, secret: bytes | None = None) -> None:
    """Write a certificate that is never readable by others."""
    lines = [f"# Tidegate. {comment}", "metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write("\n".join(lines) + "\n")


def ephemeral_keys() -> tuple[OrchestratorKeys, EngineKeys]:
    """Create keys of both ends that are never written to disk, and end with their processes."""
    _check_curve()
    own_public, own_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    orchestrator = OrchestratorKeys(own_public, own_secret, frozenset({public}))
    return orchestrator, EngineKeys(public, secret, own_public)


# ------------------------------------------------------------ key files


def read_orchestrator_keys(directory: Path) -> OrchestratorKeys:
    """Read the keys of the listening end from the directory given to ``tidegate keys``.

    Raises:
        ConfigError: a file is missing, damaged, or readable by others.
    """
    public, secret = _read_pair(directory / _ORCHESTRATOR_SECRET)
    keys = OrchestratorKeys(public, secret, directory / _ALLOWED)
    read_allowed(keys.allowed)
    return keys


def read_engine_keys(directory: Path) -> EngineKeys:
    """Read the keys of a connecting end from a directory that ``tidegate keys`` made for it.

    Raises:
        ConfigError: a file is missing, damaged, or readable by others.
    """
    public, secret = _read_pair(directory / _ENGINE_SECRET)
    path = directory / _ORCHESTRATOR_PUBLIC
    _check_file(path, forbidden=0o022)
    return EngineKeys(public, secret, _read(path)[0])


def read_allowed(directory: Path | frozenset[bytes]) -> dict[bytes, str]:
    """Return the public keys that may connect (32 bytes each), with the names of their files.

    Raises:
        ConfigError: a file is damaged, or others could add or change one.
    """
    if not isinstance(directory, Path):
        return {z85.decode(public): ENGINE_DEFAULT for public in directory}
    try:
        mode = directory.stat().st_mode
        paths = sorted(directory.glob("*.key"))
    except OSError as error:
        raise ConfigError(f"can't read the keys of allowed engines: {error}; {_HINT}") from error
    _check_mode(directory, mode, 0o022)
    allowed = {}
    for path in paths:
        _check_file(path, forbidden=0o022)
        allowed[z85.decode(_read(path)[0])] = path.stem
    return allowed


_HINT = "`tidegate keys DIRECTORY` makes a set of keys and says what goes where"


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    _check_file(path, forbidden=0o077)
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"{path} has no secret key; {_HINT}")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"{path} has a public key that does not belong to its secret key; copy the file again, "
            "or make new keys with `tidegate keys`"
        )
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key in a certificate, and the secret key if it has one."""
    try:
        public, secret = load_certificate(path)
        for key in (public, secret):
            if key is not None and len(z85.decode(key)) != KEY_BYTES:
                raise ValueError(f"a key has 40 characters, not {len(key)}")
    except (OSError, ValueError, KeyError) as error:
        reason = (
            "it has a character outside of Z85, in which keys are written"
            if isinstance(error, KeyError)
            else error
        )
        raise ConfigError(f"{path} holds no key that can be read: {reason}; {_HINT}") from error
    return public, secret


def _check_file(path: Path, *, forbidden: int) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; {_HINT}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > KEY_FILE_BYTES_MAX:
        raise ConfigError(f"{path} is no file of keys; {_HINT}")
    _check_mode(path, status.st_mode, forbidden)


def _check_mode(path: Path, mode: int, forbidden: int) -> None:
    if mode & forbidden:
        access = "read" if forbidden & 0o044 else "change"
        raise ConfigError(
            f"others may {access} {path} (mode {stat.S_IMODE(mode):03o}); remove their access: "
            f"chmod go-{('rwx' if forbidden & 36 else 'w')} {path}"
        )


# ------------------------------------------------------------ sockets


def secure_listener(socket: Socket, keys: OrchestratorKeys) -> None:
    """Make an unbound socket a CURVE server, authenticated by the ZAP handler of its context.

    ZAP_ENFORCE_DOMAIN rejects all clients if there is no handler; libzmq's default accepts all.
    """
    _check_curve()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"tidegate")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_connector(socket: Socket, keys: EngineKeys) -> None:
    """Make an unconnected socket a CURVE client of the orchestrator with these keys."""
    _check_curve()
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.orchestrator)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            f"this libzmq {zmq.zmq_version()} was built without CURVE; install a pyzmq wheel"
        )
