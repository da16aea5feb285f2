"""What Hydra 1.3 and 1.4 ask for differently, in one place. Delete with the support of 1.3.

1.4 deprecates `version_base`, and instantiates what a configuration names only where code that is trusted listed it;
1.3 knows no such list.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

HAS_WHITELIST = tuple(int(part) for part in importlib.metadata.version("hydra-core").split(".")[:2]) >= (1, 4)

BASE: dict[str, Any] = {} if HAS_WHITELIST else {"version_base": "1.3"}
"""Arguments of `hydra.main` and `initialize_config_dir` for the behaviour of 1.3."""

CALLBACKS: dict[str, Any] = {"execution_whitelist": "cascade_train.config.sweep.SweepResults"} if HAS_WHITELIST else {}
"""Arguments of `hydra.main` that let it make the callbacks of conf/config.yaml."""
