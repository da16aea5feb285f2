"""What a user writes for `data.urls` -> local paths of tar files, in order.

Local files only; remote stores come as their own readers.
"""

from __future__ import annotations

import re
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from cascade_train.errors import ConfigError

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):")


def expand_urls(urls: str | list[str]) -> list[Path]:
    """Expand brace patterns and `file:` in one entry or a list of them; every path must be a file.

    Raises:
        ConfigError: a pattern is malformed, a scheme is not local, or a file is missing.
    """
    patterns = [urls] if isinstance(urls, str) else urls
    paths = [_local_path(url) for pattern in patterns for url in _braces(pattern)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(_missing_text(patterns, missing, len(paths)))
    return paths


def _braces(pattern: str) -> list[str]:
    try:
        return list(braceexpand(pattern))
    except UnbalancedBracesError as error:
        raise ConfigError(f"data.urls={pattern} has unbalanced braces: write {{000..005}} or {{a,b}}") from error


def _local_path(url: str) -> Path:
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).expanduser()
    if scheme[1] != "file":
        raise ConfigError(
            f"data.urls={url} is not a local file: {scheme[1]}: is not supported; copy the tars to a local or shared"
            " disk and give their paths"
        )
    path = url.removeprefix("file:")
    return Path(path.removeprefix("//") if path.startswith("//") else path)


def _missing_text(patterns: list[str], missing: list[Path], total: int) -> str:
    shown = ", ".join(str(path) for path in missing[:3]) + (", ..." if len(missing) > 3 else "")
    text = f"data.urls={','.join(patterns)}: {len(missing)} of {total} tar files not found: {shown}."
    if missing[0].is_dir():
        return f"{text} {missing[0]} is a folder: name the tar files in it, as in {missing[0]}/{{000..005}}.tar"
    if any("*" in path.name for path in missing):
        return f"{text} Name them by braces, as in shard-{{000..005}}.tar, or as a list"
    return f"{text} Paths are relative to the current folder, {Path.cwd()}"
