"""A module without its siblings, and the package as it is afterwards."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from cascade_train.files.package import without_siblings


def test_one_module_is_imported_alone_and_the_package_later_finds_it(tmp_path: Path, monkeypatch):
    folder = tmp_path / "shop" / "parts"
    folder.mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").touch()
    (folder / "__init__.py").write_text("from shop.parts import one, two\n")
    for name in ("one", "two"):
        (folder / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with without_siblings("shop.parts"):
        one = importlib.import_module("shop.parts.one")
    assert "shop.parts" not in sys.modules
    assert "shop.parts.two" not in sys.modules
    package = importlib.import_module("shop.parts")
    assert package.one is one
    assert package.two is sys.modules["shop.parts.two"]
    with without_siblings("shop.parts"):
        assert sys.modules["shop.parts"] is package
    for name in ("shop", "shop.parts", "shop.parts.one", "shop.parts.two"):
        del sys.modules[name]
