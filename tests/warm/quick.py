"""What makes a small run in a test cheaper and changes none of its numbers: a third to a half of its seconds.

Charts of the loss are blank pictures, a YAML file is parsed once per process, and Hydra composes once per start: it
composes first to learn `hydra.mode` alone. Charts themselves: tests/unit/engine/test_loss_charts.py; a start without
any of this: tests that run `sys.executable`, such as test_start.py and test_packaged.py.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
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
    """Parse the same text of YAML once, and compose for Hydra's mode only where a command may set it."""
    import yaml
    from hydra._internal.hydra import Hydra
    from omegaconf import OmegaConf
    from omegaconf._utils import get_yaml_loader

    get_mode = Hydra.get_mode
    parse = functools.cache(lambda text: yaml.load(text, Loader=get_yaml_loader()))

    def load(file: str | Path | io.IOBase) -> Any:
        found = parse(Path(file).read_text("utf-8") if isinstance(file, str | Path) else file.read())
        return OmegaConf.create({} if found is None else found)

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        is_own = any(each.provider == "command-line" for each in self.config_loader.get_search_path().get_path())
        is_typed = any("hydra" in override for override in overrides)
        return get_mode(self, config_name, overrides) if is_own or is_typed else None

    for owner, name, quick in ((OmegaConf, "load", staticmethod(load)), (Hydra, "get_mode", mode)):
        setattr(owner, name, quick)
