import ast
import sys
from pathlib import Path

import pytest

from cascade_train.config.static.signatures import read_signature
from cascade_train.config.static.static_source import UnreadableError, absolute, find, load_module, lookup, module_file
from cascade_train.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package whose import would fail."""
    root = tmp_path / "untouched"
    files = {
        "__init__.py": "raise RuntimeError()\nfrom .inner import Thing as Renamed\nfrom untouched.stars import *",
        "inner.py": "try:\n    from .deep.leaf import Leaf\nexcept ImportError:\n    Leaf = None\n"
        "class Thing:\n    @classmethod\n    def make(cls, *, a: int): ...\nOther = Thing\nfrom . import loop_a",
        "deep/leaf.py": "class Leaf: ...",
        "stars.py": "class Starred: ...",
        "lazy.py": "def __getattr__(name): ...",
        "loop_a.py": "from untouched.loop_b import X",
        "loop_b.py": "from untouched.loop_a import X",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_sources()
    yield root
    forget_sources()
    assert "untouched" not in sys.modules


def forget_sources() -> None:
    """Forget what was read of all modules; signatures too, whose classes would be others than those read anew."""
    load_module.cache_clear()
    read_signature.cache_clear()


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("untouched.inner.Thing", "Thing"),
        ("untouched.Renamed", "Thing"),
        ("untouched.inner.Other", "Thing"),
        ("untouched.Starred", "Starred"),
        ("untouched.inner.Leaf", "Leaf"),
        ("untouched.deep.leaf.Leaf", "Leaf"),
        ("untouched.inner.Thing.make", "make"),
    ],
)
def test_dotted_path_is_followed_through_re_exports(package: Path, target: str, kind: str):
    node = find(target).node
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    assert node.name == kind


def test_name_that_is_not_there_is_refused_with_the_nearest(package: Path):
    with pytest.raises(ConfigError, match=r"leaf has no 'Leef'. Did you mean untouched.deep.leaf.Leaf\?"):
        find("untouched.deep.leaf.Leef")


def test_package_that_is_not_installed_is_refused():
    with pytest.raises(
        ConfigError, match="there is no module or package 'nowhere' where Python looks .*current folder, /.*PYTHONPATH"
    ):
        find("nowhere.at.All")


def test_names_made_at_import_are_not_judged(package: Path):
    with pytest.raises(UnreadableError, match="makes its names at import"):
        find("untouched.lazy.Anything")


def test_members_made_at_run_time_are_not_judged(package: Path):
    with pytest.raises(UnreadableError, match="'dynamic' is not in the source of its parent"):
        find("untouched.inner.Thing.dynamic")


def test_import_cycles_end(package: Path):
    module = load_module("untouched.loop_a")
    assert module is not None
    assert lookup(module, "X") is None
    with pytest.raises(UnreadableError, match="'X' is not in the source of its parent"):
        find("untouched.inner.loop_a.X")


def test_relative_imports_become_absolute(package: Path):
    statement = ast.parse("from ..a import b").body[0]
    module = load_module("untouched.deep.leaf")
    assert module is not None
    assert isinstance(statement, ast.ImportFrom)
    assert absolute(module, statement) == "untouched.a"


def test_modules_without_source_have_no_file():
    assert module_file("sys") is None
    assert module_file("__main__") is None or module_file("__main__").suffix == ".py"
    assert module_file("cascade_train.config.static.static_source").name == "static_source.py"
    assert module_file("cascade_train.config").name == "__init__.py"
