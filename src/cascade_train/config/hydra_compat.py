"""What Hydra 1.3 and 1.4 ask for differently, and a file that is not UTF-8. Delete 1.3's with its support.

1.4 deprecates `version_base`, and instantiates what a configuration names only where code that is trusted listed it;
1.3 knows no such list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hydra import __version__
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

from cascade_train.errors import ConfigError

HAS_WHITELIST = tuple(int(part) for part in __version__.split(".")[:2]) >= (1, 4)

BASE: dict[str, Any] = {} if HAS_WHITELIST else {"version_base": "1.3"}
"""Arguments of `hydra.main` and `initialize_config_dir` for the behaviour of 1.3."""

CALLBACKS: dict[str, Any] = {"execution_whitelist": "cascade_train.config.sweep.SweepResults"} if HAS_WHITELIST else {}
"""Arguments of `hydra.main` that let it make the callbacks of conf/config.yaml."""

_load_any: Any = ConfigRepository.load_config


def _load_checked(repository: ConfigRepository, config_path: str) -> Any:
    """Load a file of a configuration; name one that is not UTF-8, and read the header behind a byte order mark, too."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or source.scheme() != "file":
        return _load_any(repository, config_path)
    file = Path(source.path, source._normalize_file_name(config_path))
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, line = error.start, content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file} is not UTF-8: byte 0x{content[at]:02x} at {at}, line {line}. Save it as UTF-8."
        ) from error
    loaded = _load_any(repository, config_path)
    loaded.header = source._get_header_dict(text)
    return loaded


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def texts_checked() -> AbstractContextManager[None]:
    """Let Hydra name a file that is not UTF-8, and read the header behind a byte order mark, within this block."""
    return replaced(ConfigRepository, "load_config", _load_checked)
