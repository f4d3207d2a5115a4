"""Where is NCCL's double? Built by each test run, under the real library's name."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tidegate.transport.weight_channels.cuda_nccl import LIBRARY


def built(folder: Path) -> Path:
    """The library, in ``folder``; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NCCL's double is C, and there is no compiler")
    library = folder / LIBRARY
    source = Path(__file__).with_name("nccl_double.c")
    named = f"-Wl,-soname,{LIBRARY}"  # whoever loads that one by name has this one then
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", named, "-o"]
    command += [str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library
