"""What Hydra 1.3 and 1.4 ask for differently, and a file that is not UTF-8. Delete 1.3's with its support.

1.4 deprecates `version_base`, and instantiates what a configuration names only where code that is trusted listed it;
1.3 knows no such list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import __version__
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource

from cascade_train.errors import ConfigError

HAS_WHITELIST = tuple(int(part) for part in __version__.split(".")[:2]) >= (1, 4)

BASE: dict[str, Any] = {} if HAS_WHITELIST else {"version_base": "1.3"}
"""Arguments of `hydra.main` and `initialize_config_dir` for the behaviour of 1.3."""

CALLBACKS: dict[str, Any] = {"execution_whitelist": "cascade_train.config.sweep.SweepResults"} if HAS_WHITELIST else {}
"""Arguments of `hydra.main` that let it make the callbacks of conf/config.yaml."""

_load_any: Any = ConfigRepository.load_config


def _load_config(repository: ConfigRepository, config_path: str) -> Any:
    """Load a file of a configuration; name one that is not UTF-8, and read the header behind a byte order mark, too."""
    try:
        loaded = _load_any(repository, config_path)
    except UnicodeDecodeError as error:
        found = repository._find_object_source(config_path, ObjectType.CONFIG)
        assert found is not None, "it was just read"
        raise not_utf8(Path(found.path) / found._normalize_file_name(config_path)) from error
    if loaded is not None and loaded.header["package"] is None and loaded.path.startswith("file://"):
        path = Path(loaded.path.removeprefix("file://")) / ConfigSource._normalize_file_name(config_path)
        with path.open(encoding="utf-8") as file:
            text = file.read(512)
        if text.startswith("\ufeff"):
            loaded.header = ConfigSource._get_header_dict(text[1:])
    return loaded


def not_utf8(path: Path) -> ConfigError:
    """Return the refusal of a text that is not UTF-8, with the place of its first fault."""
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        place = f": byte 0x{content[error.start]:02x} at {error.start}, line {content.count(10, 0, error.start) + 1}"
    else:
        place = ""
    return ConfigError(f"{path} is not UTF-8{place}. Save it as UTF-8.")


@contextmanager
def texts_checked() -> Iterator[None]:
    """Let Hydra name a file that is not UTF-8, and read the header behind a byte order mark, within this block."""
    before = ConfigRepository.load_config
    ConfigRepository.load_config = _load_config  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ConfigRepository.load_config = before  # type: ignore[method-assign]
