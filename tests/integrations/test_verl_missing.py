"""What the plug-in for verl says where verl is missing, or is another release."""

import importlib
import sys
import types

import pytest

PLUGIN = "tidegate.integrations.verl"


@pytest.fixture(autouse=True)
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget verl and the plug-in, so that each test imports them anew."""
    for name in [name for name in sys.modules if f"{name}.".startswith(("verl.", f"{PLUGIN}."))]:
        monkeypatch.delitem(sys.modules, name)


def test_without_verl_the_plugin_says_which_release_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match=r"run pip install verl==0\.9\.1"):
        importlib.import_module(PLUGIN)


def test_a_verl_without_the_registry_is_refused_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("verl", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.base"):
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match=r"needs verl 0\.9\.1 \(cannot import name '_ROLLOUT_REG"):
        importlib.import_module(PLUGIN)
