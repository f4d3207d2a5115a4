"""Build, cache and ownership checks of the compiled code, and its behaviour without memory."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate.kernels import compiled

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        shutil.which(shlex.split(compiled.COMPILER)[0]) is None,
        reason=f"no {compiled.COMPILER}: engines compute by torch's code here",
    ),
]


@dataclass
class UserHome:
    """A user's home, and a fast compiler: it copies what the real one has built."""

    path: Path
    monkeypatch: pytest.MonkeyPatch

    def cache(self, name: str) -> Path:
        """Use and return another cache directory, because a process cannot load one file twice."""
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.path / name))
        return self.path / name / "tidegate"

    def load(self) -> int:
        """Load the code as a starting engine does; return the number of compilations so far."""
        assert compiled.library.__wrapped__() is not None
        return len((self.path / "runs").read_text().splitlines())

    def with_kept(self, name: str, text: str) -> Path:
        """Return a cache with this text in place of the compiled code."""
        directory = self.cache(name)
        directory.mkdir(parents=True, mode=0o700)
        (kept,) = (self.path / "first" / "tidegate").iterdir()
        kept = directory / kept.name
        kept.write_text(text)
        return kept


@pytest.fixture
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserHome:
    """A home directory whose first cache has the compiled code."""
    built = compiled.library()
    assert built is not None
    script = tmp_path / "compiler.sh"
    script.write_text(f'for to; do :; done\necho >>{tmp_path}/runs\ncp {built._name} "$to"\n')
    monkeypatch.setattr(compiled, "COMPILER", f"sh {script}")
    made = UserHome(tmp_path, monkeypatch)
    made.cache("first")
    assert made.load() == 1
    return made


def test_code_is_compiled_once_into_a_private_cache(user_home: UserHome) -> None:
    assert user_home.load() == 1
    cache = user_home.cache("first")
    (kept,) = cache.iterdir()
    assert (cache.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o700)


def test_code_that_is_damaged_or_that_others_may_have_written_is_compiled_again(
    user_home: UserHome,
) -> None:
    user_home.with_kept("damaged", "not a library")
    assert [user_home.load(), user_home.load()] == [2, 2]
    (good,) = user_home.cache("first").iterdir()
    kept = user_home.with_kept("strange", "")
    shutil.copy(good, kept)
    kept.chmod(0o722)
    assert [user_home.load(), user_home.load()] == [3, 3]


def test_a_cache_that_others_may_write_to_is_left_alone(
    user_home: UserHome, caplog: pytest.LogCaptureFixture
) -> None:
    kept = user_home.with_kept("open", "code of another user")
    kept.parent.chmod(0o777)
    assert [user_home.load(), user_home.load()] == [2, 3]
    assert kept.read_text() == "code of another user"
    assert "others may write to it" in caplog.text


@pytest.mark.parametrize("compiler", ["", 'g++ "', "there-is-none"])
def test_a_compiler_that_cannot_run_counts_as_missing(
    user_home: UserHome, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    user_home.cache("empty")
    monkeypatch.setattr(compiled, "COMPILER", compiler)
    assert compiled.library.__wrapped__() is None


MULTIPLY_WITHOUT_MEMORY = """
import resource, torch
from tidegate.kernels.rounded_matrix import make_int8_matrix
from tidegate.kernels.weight_matrix import make_matrix

torch.set_num_threads(4)
wide = make_int8_matrix(1, 1 << 22, torch.bfloat16)
many = make_matrix(4096, 1024, torch.float32, is_packed=True)
many.rows(0, 4096).copy_(torch.ones(4096, 1024))
x, y, out = torch.ones(8, 1 << 22, dtype=torch.bfloat16), torch.ones(8, 1024), torch.zeros(8, 4096)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), resource.RLIM_INFINITY))
many.add_linear_(out, y)  # the threads that share this would want 8 MB each
try:
    wide.linear(x)  # and this 128 MB
except MemoryError as error:
    print(float(out.min()), float(out.max()), error)
"""


def test_without_memory_compiled_code_says_so_and_without_threads_it_does_without() -> None:
    run = subprocess.run(
        [sys.executable, "-c", MULTIPLY_WITHOUT_MEMORY], capture_output=True, text=True, check=False
    )
    text = "1024.0 1024.0 compiled code could not allocate its working memory; start fewer engines"
    assert run.stdout.startswith(text), run.stderr
