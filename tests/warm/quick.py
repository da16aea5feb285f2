"""What makes a small run in a test cheaper and changes none of its numbers: a third to a half of its seconds.

Charts of the loss are blank pictures, a YAML file is parsed once per process, and Hydra composes once per start: it
composes first to learn `hydra.mode` alone. Charts themselves: tests/unit/engine/test_loss_charts.py; a start without
any of this: tests that run `sys.executable`, such as test_start.py and test_packaged.py.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


class Blank:
    """Stands for a chart of matplotlib."""

    def __init__(self, *_: Any) -> None:
        """Take what would be drawn."""

    def savefig(self, path: Path, metadata: dict[str, str] | None = None) -> None:
        """Write a picture with the metadata of the chart."""
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        for key, text in (metadata or {}).items():
            info.add_text(key, text)
        Image.new("RGB", (720, 360), "white").save(path, "PNG", pnginfo=info)


def leave_charts_blank(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Draw no chart of the loss from here on."""
    from cascade_train.engine import loss_charts

    for name in ("draw_curve", "draw_losses"):
        replace(loss_charts, name, Blank)


def compose_quickly() -> None:
    """Parse a text of YAML once, merge the same files once, compose for Hydra's mode only where one may set it."""
    import yaml
    from hydra._internal.hydra import Hydra
    from omegaconf import OmegaConf
    from omegaconf._utils import get_yaml_loader

    get_mode = Hydra.get_mode

    @functools.cache
    def parse(text: str) -> bytes:
        found = yaml.load(text, Loader=get_yaml_loader())
        return pickle.dumps(OmegaConf.create({} if found is None else found))

    def load(file: str | Path | io.IOBase) -> Any:
        return pickle.loads(parse(Path(file).read_text("utf-8") if isinstance(file, str | Path) else file.read()))

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        is_own = any(each.provider == "command-line" for each in self.config_loader.get_search_path().get_path())
        is_typed = any("hydra" in override for override in overrides)
        return get_mode(self, config_name, overrides) if is_own or is_typed else None

    for owner, name, quick in ((OmegaConf, "load", staticmethod(load)), (Hydra, "get_mode", mode)):
        setattr(owner, name, quick)
    merge_once()


def merge_once() -> None:
    """Find and merge the files of the same choices once, where all are the package's; single keys come after."""
    from hydra._internal import config_loader_impl as hydra
    from hydra._internal.defaults_list import DefaultsList, Overrides

    from cascade_train.config.groups import conf_dir

    lasting = {str(conf_dir()), "hydra.conf", ""}
    lists: dict[Any, DefaultsList] = {}
    merged: dict[int, bytes] = {}  # by the identity of what lists have
    find, merge = hydra.create_defaults_list, hydra.ConfigLoaderImpl._compose_config_from_defaults_list

    def found(repo: Any, config_name: str | None, overrides_list: list[Any], **how: Any) -> DefaultsList:
        paths = tuple(source.path for source in repo.get_sources())
        if not lasting.issuperset(paths):
            return find(repo, config_name, overrides_list, **how)
        single_keys = Overrides(repo, overrides_list).config_overrides
        kept = {id(each) for each in single_keys}
        choices = [each for each in overrides_list if id(each) not in kept]
        key = (paths, config_name, *how.items(), *(each.input_line for each in choices))
        if key not in lists:
            lists[key] = find(repo, config_name, choices, **how)
        return replace(lists[key], config_overrides=single_keys)

    def merged_once(self: hydra.ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        if not any(each.defaults is defaults for each in lists.values()):
            return merge(self, defaults, repo)
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(merged[id(defaults)])

    hydra.create_defaults_list = found
    hydra.ConfigLoaderImpl._compose_config_from_defaults_list = merged_once  # type: ignore[method-assign]
