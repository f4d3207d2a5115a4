"""Build directory of the package: a temporary one, removed afterwards.

In a clone, setuptools' own `build/` keeps modules that were deleted since, and ships them again.
All else about the package is in pyproject.toml.
"""

import atexit
import shutil
import tempfile

from setuptools import setup

directory = tempfile.mkdtemp(prefix="tidegate-build.")
atexit.register(shutil.rmtree, directory, ignore_errors=True)
setup(options={"build": {"build_base": directory}})
