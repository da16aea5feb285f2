"""Networks, stages, frozen encoders, adapters, and their weights in every format. The only home of diffusers.

diffusers, transformers and peft load xformers and bitsandbytes wherever these are installed, and fail where they cannot
be loaded. Here xformers is loaded for `attention=xformers` alone (networks/block_network.py), and a bitsandbytes that
cannot be loaded counts as not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeDiffusers(MetaPathFinder):
    """Hides the two packages right before the first of the libraries that would load them is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing."""
        if fullname not in ("diffusers", "transformers", "peft"):
            return
        sys.meta_path.remove(self)
        sys.modules.setdefault("xformers", None)
        if importlib.util.find_spec("bitsandbytes") is not None:
            try:
                importlib.import_module("bitsandbytes")
            except Exception:  # whatever a library that does not fit its machine raises
                sys.modules["bitsandbytes"] = None  # type: ignore[assignment]


sys.meta_path.insert(0, _BeforeDiffusers())
