"""Compiler of grammars: runs each one in a helper process under limits first, then in a thread.

llguidance compiles some grammars in cubic time and gigabytes: ``{"multipleOf": 1000003}`` takes 5
s, and 32 KB of alternatives take a minute. Its own limits do not cover that work, and a thread that
has begun it cannot be stopped. So a helper process, which RLIMIT_CPU and RLIMIT_AS can end,
compiles every grammar first. The engine compiles a grammar again only if the helper could: on a
thread and without the GIL, while the engine's loop decodes other turns.

``python -m tidegate.engine.sampling.grammar_compiler`` is the helper process. It imports no torch.
"""

import contextlib
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec
from tokenizers import Tokenizer

from tidegate.errors import TurnRefused
from tidegate.transport.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GRAMMAR_BYTES_MAX = 64 * 1024
"""Limit of a grammar or schema in llguidance's form, in bytes."""

COMPILE_CPU_S = 2
"""CPU seconds of one compilation. A grammar of a kilobyte takes milliseconds; objects of 2,000
properties take 0.2 s. RLIMIT_CPU counts whole seconds, so a compilation may take one more."""

COMPILE_BYTES = 128 * 2**20
"""Memory of one compilation: 49 KB of chained terminals take 110 MB, most grammars 1 MB."""

COMPILE_WALL_S = 30.0
"""Seconds for one compilation on a busy machine, where CPU time passes slowly."""

HELPER_START_S = 120.0
"""Seconds for the helper process to start and read a tokenizer. Reading 150,000 tokens takes a
second; a machine with many processes per core takes a minute."""

STEP_ITEMS_MAX = 10_000
"""Parser items of one token's mask; each costs up to 0.1 ms with hundreds of ambiguous rules.
Objects of 300 properties need 3,000."""

LEXER_STATES_MAX = 50_000
"""States of one turn's lexer, at 1-2 KB each: 100 MB. llguidance's default allows 500 MB."""

COMPILER_STACK_BYTES = 64 * 2**20
"""Stack of the compiling thread. llguidance recurses: 59 KB of rules that each name the next
exhaust 8 MiB, and 64 MiB suffice for 93 KB."""

GRAMMARS_CACHED_MAX = 16
"""Compiled grammars kept, at ``COMPILE_BYTES`` each: 2 GiB at worst. The rollouts of a group mostly
share one grammar."""

GRAMMARS_WAITING_MAX = 256
"""Limit of grammars waiting for the compiling thread; at most one per turn waits."""

_LENGTH = struct.Struct("<I")
"""Length prefix of each message between the engine and its helper."""


class Vocabulary(NamedTuple):
    """Tokens that a grammar's masks cover."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_id: int
    """Token that llguidance takes for the end of a text."""


class _CompileRequest(msgspec.Struct):
    """Request to the helper process."""

    text: str
    vocab_size: int
    eos_token_id: int


class _Job(NamedTuple):
    """A compilation that the thread has not started."""

    future: "weakref.ref[Future[LLMatcher]]"
    """Dead if every turn that wanted the grammar has ended."""
    vocabulary: Vocabulary
    text: str


class GrammarCompiler:
    """Compiled grammars of one engine; its methods are called from the engine's loop."""

    def __init__(self) -> None:
        """Start nothing: the thread and the helper process start with the first grammar."""
        self._futures: weakref.WeakValueDictionary[tuple[object, ...], Future[LLMatcher]] = (
            weakref.WeakValueDictionary()
        )
        """Every compilation that a caller, the thread or ``_recent`` still holds."""
        self._recent: OrderedDict[tuple[object, ...], Future[LLMatcher]] = OrderedDict()
        """Finished compilations, failed ones too; least recently used first."""
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """Compilations not started, in order of arrival; None ends the thread."""
        self._thread: threading.Thread | None = None
        self._helper: _HelperProcess | None = None

    def compile(self, vocabulary: Vocabulary, text: str) -> "Future[LLMatcher]":
        """Compile a grammar in llguidance's form; return the future matcher, to be copied per turn.

        The caller must hold the future: a compilation whose future is dropped is not started. The
        future raises ValueError if the text is no grammar, or takes too much time or memory.

        Raises:
            TurnRefused: llguidance is not installed.
            ValueError: the grammar is too large, or too many grammars are queued.
        """
        library()
        nbytes = len(text.encode())
        if nbytes > GRAMMAR_BYTES_MAX:
            raise ValueError(
                f"the grammar has {nbytes} bytes, and the limit is {GRAMMAR_BYTES_MAX}; output"
            )
        key = (*vocabulary, text)
        future = self._futures.get(key)
        if future is None:
            if self._queue.qsize() >= GRAMMARS_WAITING_MAX:
                raise ValueError(
                    f"{GRAMMARS_WAITING_MAX} other grammars are queued for compilation; try "
                    "again later"
                )
            future = self._futures[key] = Future()
            self._queue.put(_Job(weakref.ref(future), vocabulary, text))
            self._start()
        if future.done():
            self._recent[key] = future
            self._recent.move_to_end(key)
            while len(self._recent) > GRAMMARS_CACHED_MAX:
                self._recent.popitem(last=False)
        return future

    def close(self) -> None:
        """Stop the helper process and the thread. Harmless if there are none."""
        self._queue.put(None)
        if self._helper is not None:
            self._helper.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = _start_deep_thread(self._run)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future = job.future()
            if future is None:
                continue
            try:
                future.set_result(self._compile(job.vocabulary, job.text))
            except BaseException as error:  # noqa: BLE001 - a library's panic is no Exception
                future.set_exception(
                    error if isinstance(error, ValueError) else ValueError(repr(error))
                )
            del future
        if self._helper is not None:
            self._helper.close()  # started after close() was called

    def _compile(self, vocabulary: Vocabulary, text: str) -> "LLMatcher":
        if self._helper is None or self._helper.has_ended:
            self._helper = _HelperProcess(vocabulary.tokenizer)
        self._helper.send(_CompileRequest(text, vocabulary.vocab_size, vocabulary.eos_token_id))
        try:
            tokens_of(vocabulary)  # the first time as slow as the helper's start, and beside it
        finally:
            error = self._helper.reply()
        if error:
            raise ValueError(error)
        return _compile_here(vocabulary, text)


class _HelperProcess:
    """A running helper process, as the compiling thread uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start the process, which reads the tokenizer before its first request.

        Raises:
            ValueError: it cannot start.
        """
        command = [sys.executable, "-m", "tidegate.engine.sampling.grammar_compiler"]
        self._has_replied = False
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise ValueError(f"the grammar compiler's process can't start: {error}") from None
        self._send(tokenizer.to_str().encode())

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def send(self, request: _CompileRequest) -> None:
        """Have the helper compile a grammar."""
        self._send(msgspec.msgpack.encode(request))

    def reply(self) -> str:
        """Wait until the helper has compiled the grammar; return the error message, or an empty
        string."""
        stdout = self._process.stdout
        assert stdout is not None
        limit_s = COMPILE_WALL_S if self._has_replied else HELPER_START_S + COMPILE_WALL_S
        if not select.select([stdout], [], [], limit_s)[0]:
            self.close()
            return f"compilation took longer than {limit_s:.0f} s; constrain less of the output"
        self._has_replied = True
        reply = _read(stdout)
        return self._exit_reason() if reply is None else reply.decode()

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it has ended before it read everything
                    pipe.close()

    def _send(self, body: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, as its reply says
            _write(self._process.stdin, body)

    def _exit_reason(self) -> str:
        status = self._process.wait()
        self.close()
        if status == -signal.SIGXCPU:
            return (
                f"compilation took more than {COMPILE_CPU_S} s of CPU time; constrain less of the "
                "output"
            )
        return (
            f"compilation took more than {COMPILE_BYTES >> 20} MiB of memory, or ended the "
            f"compiler otherwise (exit status {status}); constrain less of the output"
        )


def library() -> "type[LLMatcher]":
    """Return llguidance's matcher class.

    Raises:
        TurnRefused: it is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise TurnRefused(
            f"grammars and JSON schemas need llguidance where engines run ({error}); "
            f"pip install 'tidegate[grammar]'"
        ) from None
    return LLMatcher


@lru_cache(maxsize=2)  # an engine has one tokenizer; reading 150,000 tokens takes a second
def tokens_of(vocabulary: Vocabulary) -> "LLTokenizer":
    """Convert a vocabulary to llguidance's form.

    llguidance reads tokenizers by itself, too, but takes every added token as special: a text with
    Qwen's ``<think>`` would be forced as that token, and then refused.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(_ExactTokens(vocabulary))
    return LLTokenizer(wrapper, n_vocab=vocabulary.vocab_size, eos_token=vocabulary.eos_token_id)


class _ExactTokens:
    """Tokenizer for llguidance: bytes of each token, and canonical tokens of forced text.

    Only special tokens are apart from the text. Other added tokens are text, such as ``<think>``.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer, vocab_size, self.eos_token_id = vocabulary
        self.bos_token_id = None
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        token_bytes = TokenBytes(tokenizer)
        self.tokens = [token_bytes[token_id] for token_id in range(vocab_size)]
        # The helper's tokenizer is plain; a copy is as slow to make as all that is above.
        is_plain = tokenizer.encode_special_tokens
        self._plain = tokenizer if is_plain else _plain_tokenizer(tokenizer.to_str())

    def __call__(self, text: str) -> list[int]:
        """Return a text's tokens; none where the tokenizer changes the text, so nothing is
        forced."""
        for before in ("", "\n"):  # some tokenizers write a space before a text's first word
            ids = self._plain.encode(before + text, add_special_tokens=False).ids
            written = b"".join(self.tokens[token_id] for token_id in ids)
            expected = text.encode()
            while len(written) > len(expected):
                written = written[len(self.tokens[ids.pop(0)]) :]
            if written == expected:
                return list(ids)
        return []


def _plain_tokenizer(text: str) -> Tokenizer:
    """Read a tokenizer that takes the text of a special token for text."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=LEXER_STATES_MAX, step_max_items=STEP_ITEMS_MAX)


def _compile_here(vocabulary: Vocabulary, text: str) -> "LLMatcher":
    """Compile a grammar in this process.

    Raises:
        ValueError: the text is no grammar, or exceeds llguidance's own limits.
    """
    matcher = library()(tokens_of(vocabulary), text, log_level=0, limits=_limits())
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _start_deep_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread with enough stack for any grammar of ``GRAMMAR_BYTES_MAX``."""
    before = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammar compiler", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


# ---------------------------------------------------------------- the helper process


def _write(pipe: IO[bytes], body: bytes) -> None:
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Read the next message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (nbytes,) = _LENGTH.unpack(head)
    body = pipe.read(nbytes)
    return body if len(body) == nbytes else None


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Read a tokenizer, then grammars; reply to each grammar with an error or nothing, until the
    engine ends."""
    first = _read(requests)
    if first is None:
        return
    tokenizer = _plain_tokenizer(first.decode())
    while (body := _read(requests)) is not None:
        request = msgspec.msgpack.decode(body, type=_CompileRequest)
        _write(replies, _check(tokenizer, request).encode())


def _check(tokenizer: Tokenizer, request: _CompileRequest) -> str:
    vocabulary = Vocabulary(tokenizer, request.vocab_size, request.eos_token_id)
    tokens_of(vocabulary)  # cached, and outside the limits, which are for the grammar
    _limit_this_process()
    try:
        matcher = _compile_here(vocabulary, request.text).deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
    except Exception as error:  # noqa: BLE001 - any error must reach the engine
        return str(error) or repr(error)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ""


def _limit_this_process() -> None:
    """Limit CPU time and memory to what is used now plus one compilation's allowance."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + COMPILE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + COMPILE_BYTES, resource.RLIM_INFINITY))


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, and ends this with it
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    thread = _start_deep_thread(lambda: _serve(requests, replies))
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    _main()
