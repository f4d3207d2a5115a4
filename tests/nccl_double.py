"""Builds the NCCL test double (``nccl_double.c``) under the real library's name."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tidegate.transport.weight_channels.cuda_nccl import LIBRARY


def built(folder: Path) -> Path:
    """Build the library in ``folder``; skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NCCL's double is C, and there is no compiler")
    library = folder / LIBRARY
    source = Path(__file__).with_name("nccl_double.c")
    named = f"-Wl,-soname,{LIBRARY}"  # a loader of that name gets this library
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", named, "-o"]
    command += [str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library
