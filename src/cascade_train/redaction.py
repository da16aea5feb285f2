"""What must not be written down or shown: passwords, tokens and keys, in a text or under a name of a configuration.

Every writer of a file, a log line or a tracker asks here, so that there is one answer. Two configurations that differ
in a secret alone are the same after it: a secret says who may read, not what is read. A false alarm would make two
different settings equal, so that each rule asks for a form that nothing else has.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<redacted>"

_PASSWORD = r"(?:pass(?:word|wd|phrase)|secrets?|credentials?)"
_KEY = (
    r"(?:token|(?:api|access|secret|private|account|signing|auth)[_-]?key(?:[_-]?id)?|x-(?:amz|goog)-[a-z-]+|signature"
    r"|sig|authorization)"
)
_OPAQUE = r"(?=[^\s\"'&;,]{0,200}\d)[\w./+=~%:-]{12,}"
"""What a token looks like: long, one word, with a digit. `pad_token: <pad>` and a token to train do not."""

_PASSWORD_NAME = re.compile(rf"(?:.*[_.-])?{_PASSWORD}", re.IGNORECASE)
_KEY_NAME = re.compile(rf"(?:.*[_.-])?{_KEY}", re.IGNORECASE)
_OPAQUE_VALUE = re.compile(_OPAQUE)
_PREFIX = r"(?:[\w.-]{0,40}[_.-])?"  # bounded: a text from outside must not cost the square of its length
_ASSIGNED = r"(?:=|[\"']\s*:\s*)[\"']?"
_SHORTEST_OF_ENVIRONMENT = 12

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Forms that issuers chose so that they can be found.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\b(?:gh[opsur]_|github_pat_|glpat-|xox[abprs]-|wandb_v\d+_)[\w-]{16,}"), HIDDEN),
    (re.compile(r"\bsk-(?=[\w-]{0,200}\d)[\w-]{20,}"), HIDDEN),
    (re.compile(r"\bAIza[\w-]{35}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    # What a url carries before its host and behind its question mark.
    (re.compile(r"\b([a-z][a-z0-9+.-]{0,20}://)[^\s/?#\"']+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (
        re.compile(r"([?&](?:x-(?:amz|goog)-[a-z-]+|awsaccesskeyid|expires|signature|sig)=)[^\s&\"']+", re.I),
        rf"\1{HIDDEN}",
    ),
    # What commands and headers carry.
    (re.compile(r"(\bauthorization\s*:\s*)(?:[\w-]+\s+)?[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(\bbearer\s+)(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{12,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"((?<!\S)(?:-u|--user)[ =][\"']?)[^\s:\"'/]+:[^\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(\bwandb\s+login(?:\s+--\S+)*\s+)\w{20,}"), rf"\1{HIDDEN}"),
    # A name and its value.
    (re.compile(rf"(\b{_PREFIX}{_PASSWORD}{_ASSIGNED})[^\s\"'&]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"((?<!\S)--?{_PREFIX}{_PASSWORD}\s+[\"']?)[^\s\"'-][^\s\"']*", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(\b{_PREFIX}{_KEY}{_ASSIGNED}){_OPAQUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"((?<!\S)--?{_PREFIX}{_KEY}\s+[\"']?){_OPAQUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def redact(text: str) -> str:
    """Return a text with every secret in it hidden; doing it again changes nothing.

    Hidden are the forms of known issuers, what a url carries before its host and as its signature, authorization in
    commands and headers, values behind names of secrets, and the values of this process's secret environment variables.
    """
    for value in _secrets_of_environment():
        text = text.replace(value, HIDDEN)
    for pattern, shown in _RULES:
        text = pattern.sub(shown, text)
    return text


def redacted(value: Any, name: str = "") -> Any:
    """Return plain nested values with every secret in them hidden.

    Args:
        value: mappings, lists, texts and numbers.
        name: the key that it stands under.
    """
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _is_secret(name, value) else redact(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return HIDDEN if is_number and _PASSWORD_NAME.fullmatch(name) else value


def printable(text: str) -> str:
    """Return a name from outside as one line that a terminal takes as text: what cannot be printed is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class RedactingFilter(logging.Filter):
    """Hides secrets in every record of a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put the redacted message in the place of message and arguments."""
        record.msg, record.args = redact(record.getMessage()), None
        return True


def _is_secret(name: str, value: str) -> bool:
    if _PASSWORD_NAME.fullmatch(name):
        return True
    return bool(_KEY_NAME.fullmatch(name) and _OPAQUE_VALUE.fullmatch(value))


def _secrets_of_environment() -> list[str]:
    """Return the values of this process's variables with a secret's name, the longest first."""
    found = {
        value
        for name, value in list(os.environ.items())
        if len(value) >= _SHORTEST_OF_ENVIRONMENT and (_PASSWORD_NAME.fullmatch(name) or _KEY_NAME.fullmatch(name))
    }
    return sorted(found, key=len, reverse=True)
