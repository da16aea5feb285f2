"""What Hydra 1.3 and 1.4 ask for differently, and what both do slowly or say badly. Delete 1.3's with its support.

1.4 deprecates `version_base`, and instantiates what a configuration names only where code that is trusted listed it;
1.3 knows no such list. 1.4 reads `hydra.mode` from the primary file; 1.3 composes everything once more for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import omegaconf._utils
import omegaconf.base
import omegaconf.omegaconf
import yaml
from hydra import __version__
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig
from omegaconf.grammar_parser import parse

from cascade_train.errors import ConfigError

HAS_WHITELIST = tuple(int(part) for part in __version__.split(".")[:2]) >= (1, 4)

BASE: dict[str, Any] = {} if HAS_WHITELIST else {"version_base": "1.3"}
"""Arguments of `hydra.main` and `initialize_config_dir` for the behaviour of 1.3."""

CALLBACKS: dict[str, Any] = {"execution_whitelist": "cascade_train.config.sweep.SweepResults"} if HAS_WHITELIST else {}
"""Arguments of `hydra.main` that let it make the callbacks of conf/config.yaml."""

_Plain: Any = omegaconf._utils.get_yaml_loader()
_BASES: tuple[Any, ...] = (yaml.CSafeLoader, _Plain) if yaml.__with_libyaml__ else (_Plain,)


class YamlLoader(*_BASES):  # type: ignore[misc]
    """OmegaConf's constructors on libyaml's parser, where PyYAML has it: the same values, many times as fast."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._stream = stream

    def get_single_data(self) -> Any:
        """Return the values of the document; errors are those of PyYAML's own parser, which say more."""
        try:
            return super().get_single_data()
        except yaml.YAMLError:
            if hasattr(self._stream, "seek"):
                self._stream.seek(0)
            return _Plain(self._stream).get_single_data()


class YamlDumper(yaml.CDumper if yaml.__with_libyaml__ else yaml.Dumper):  # type: ignore[misc]
    """OmegaConf's representation of texts on libyaml's emitter, where PyYAML has it: the same output, faster."""


YamlDumper.add_representer(str, omegaconf._utils.OmegaConfDumper.str_representer)


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


_parsed_once = functools.lru_cache(maxsize=1024)(parse)
_map_choices: Any = getattr(defaults_list, "_create_interpolation_map", None)


def quicken() -> None:
    """Remove redundant work of Hydra and OmegaConf; the results stay the same.

    Files are read and written by libyaml, and one that is not UTF-8 is named; an interpolation, which a composition
    meets many times, is parsed once, since trees are only read; and 1.3 lists the choices so far for a file whose
    defaults refer to them, not for every file.
    """
    omegaconf._utils.get_yaml_loader = lambda: YamlLoader
    omegaconf.omegaconf.get_omega_conf_dumper = lambda: YamlDumper
    omegaconf.base.parse = omegaconf._utils.parse = _parsed_once
    ConfigRepository.load_config = _load_config  # type: ignore[assignment, method-assign]
    if _map_choices is not None:
        defaults_list._create_interpolation_map = _choices_where_asked  # type: ignore[assignment]


def _choices_where_asked(overrides: Any, defaults: Sequence[Any], self_added: bool) -> DictConfig:
    asked = any(default.is_interpolation() for default in defaults)
    choices: DictConfig = _map_choices(overrides, defaults, self_added) if asked else DictConfig({})
    return choices


@contextmanager
def composed_once(argv: Sequence[str]) -> Iterator[None]:
    """Save 1.3 a composition that only looks up `hydra.mode`, where no more than flags can have set that.

    None of our files does (tests/unit/config/test_launch.py); overrides and folders of a user's own may.
    """
    asked = Hydra.get_mode
    if not HAS_WHITELIST and not any("hydra" in each or each.startswith(("--config", "-c")) for each in argv):
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = asked  # type: ignore[method-assign]
