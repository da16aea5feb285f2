"""What a user writes for `data.urls` -> one url per tar or prefix, in order. Nothing is read here.

A url is then a path, `s3://bucket/key.tar`, `s3://bucket/prefix`, or `pipe:command`.
"""

from __future__ import annotations

import re
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from cascade_train.errors import ConfigError
from cascade_train.redaction import redact_argument

PIPE, S3 = "pipe:", "s3://"
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):")
_WEB = "pipe:curl --fail --silent --show-error --location"


def expand_urls(urls: str | list[str]) -> list[str]:
    """Expand brace patterns, `file:` and `~` in one entry or a list of them.

    Raises:
        ConfigError: a pattern is malformed, or a scheme is not known.
    """
    patterns = [urls] if isinstance(urls, str) else urls
    return [_normal(url) for pattern in patterns for url in _braces(pattern)]


def refuse_missing(urls: str | list[str], paths: list[Path]) -> None:
    """Check that every local path is a file.

    Args:
        urls: what the user wrote, for the message.
        paths: what became of it.

    Raises:
        ConfigError: some are not.
    """
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(_missing_text([urls] if isinstance(urls, str) else urls, missing, len(paths)))


def _braces(pattern: str) -> list[str]:
    try:
        expanded = list(braceexpand(pattern))
    except UnbalancedBracesError as error:
        raise ConfigError(
            f"data.urls={redact_argument(pattern)} has unbalanced braces: write {{000..005}} or {{a,b}}"
        ) from error
    return expanded if len(expanded) > 1 else [pattern]  # one alone may be a command, whose backslashes stay


def _normal(url: str) -> str:
    scheme = _SCHEME.match(url)
    if scheme is None:
        return str(Path(url).expanduser())
    if url.startswith(S3):
        return url
    if url.startswith(PIPE):
        if not url.removeprefix(PIPE).strip():
            raise ConfigError("data.urls=pipe: has no command: write pipe:cat train.tar")
        return url
    if scheme[1] == "file":
        path = url.removeprefix("file:")
        return str(Path(path.removeprefix("//") if path.startswith("//") else path))
    remedy = f"stream it by '{_WEB} {url}'" if scheme[1] in ("http", "https") else "copy the tars to a disk or to S3"
    raise ConfigError(
        f"data.urls={url} has a scheme that is not read, {scheme[1]}: (paths, file:, s3:// and pipe: are); {remedy}"
    )


def _missing_text(patterns: list[str], missing: list[Path], total: int) -> str:
    shown = ", ".join(str(path) for path in missing[:3]) + (", ..." if len(missing) > 3 else "")
    given = ",".join(map(redact_argument, patterns))
    text = f"data.urls={given}: {len(missing)} of {total} tar files not found: {shown}."
    if missing[0].is_dir():
        return f"{text} {missing[0]} is a folder: name the tar files in it, as in {missing[0]}/{{000..005}}.tar"
    if any("*" in path.name for path in missing):
        return f"{text} Name them by braces, as in shard-{{000..005}}.tar, or as a list"
    return f"{text} Paths are relative to the current folder, {Path.cwd()}"
