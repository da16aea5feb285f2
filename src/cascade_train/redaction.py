"""Hide passwords, tokens and keys in every text and configuration that is written or shown.

Every writer of a file, a log line or a tracker calls these functions. Hidden are the values of names such as `api_key`,
`password` and `secret`, credentials in urls, tokens of known issuers, and the values of secret environment variables.
Of a `pipe:` command only the program and its tars are shown, since any other word may be a secret.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

HIDDEN = "<redacted>"
LONGEST_LOGGED, LONGEST_NAME, LONGEST_REASON = 20_000, 200, 1000
"""Characters of a log line, of a name from outside, and of what is wrong with it, before they are shortened."""

_KEY = (
    r"(?:pass(?:word|wd|phrase)|(?<![^\W_])(?:access|account|api|auth|client|deploy|hf|hub|private|refresh|secret|session"
    r"|signing|wandb)[_-]?(?:key|secret|token)(?:[_-]?id)?)"
)
"""End of a name whose value is a secret in any text."""
_WORD = r"(?<![^\W_])(?:authorization|bearer|cookies?|credentials?|jwt|pwd|secrets?)"
"""The same, if it is no word of a sentence."""
_TOKEN = r"(?<![^\W_])(?:sig(?:nature)?|token)"
"""The same, if the value is opaque: `pad_token: <pad>` is no secret."""
_OPAQUE = r"(?=[^\s\"'&;,\d]{0,32}\d)[\w./+=~%:-]{12,}"
_QUOTE = r"\\?[\"']"
_VALUE = rf"(?:({_QUOTE})[^\"'\r\n]+|[^\s\"'&]+)"
_SHORTEST_OF_ENVIRONMENT = 12

_SECRET_NAME = re.compile(rf"(?:{_KEY}|{_WORD})\Z", re.IGNORECASE)
_TOKEN_NAME = re.compile(rf"{_TOKEN}\Z", re.IGNORECASE)
_OPAQUE_VALUE = re.compile(_OPAQUE)
_TAR = re.compile(r"\.(?:tar|tgz|tbz2|txz)(?![a-z])", re.IGNORECASE)
_PIECES = re.compile(r"[\s=?#&|;'\"()`$\\]+")
_PIPE = re.compile(r"pipe:(?=\S)", re.IGNORECASE)

_ISSUED = (
    r"\b(?-i:hf_[a-zA-Z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|(?:gh[opsur]_|github_pat_|glpat-|xox[abprs]-|wandb_v\d_)"
    r"[\w-]{16,}|sk-(?=[\w-]{0,64}\d)[\w-]{20,}|AIza[\w-]{35}|eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*)"
)
"""Tokens of Hugging Face, AWS, GitHub, GitLab, Slack, wandb, OpenAI, Google; JSON web tokens."""

RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), shown)
    for pattern, shown in (
        (_ISSUED, HIDDEN),
        (r"(://)[^\s/?#\"']+@", rf"\1{HIDDEN}@"),
        (rf"([?&](?:[\w.-]{{0,40}}[_.-])?(?:{_KEY}|{_WORD}|{_TOKEN}|awsaccesskeyid|key)=)[^\s&\"']+", rf"\1{HIDDEN}"),
        (r"(\bauthorization: ?)(?:\w{1,20} )?[^\s\"']+", rf"\1{HIDDEN}"),
        (rf"((?<!\S)--?(?:[\w-]{{0,20}}[_-])?(?:{_KEY}|{_WORD}) )[^\s\"'-][^\s\"']*", rf"\1{HIDDEN}"),
        (rf"((?<!\S)--?(?:[\w-]{{0,20}}[_-])?{_TOKEN} ){_OPAQUE}", rf"\1{HIDDEN}"),
        (rf"((?:{_KEY}(?:{_QUOTE})? ?[=:]|{_WORD}(?:=|{_QUOTE}:)) ?){_VALUE}", rf"\1\2{HIDDEN}"),
        (rf"((?:{_WORD}|{_TOKEN})(?:{_QUOTE})? ?[=:] ?(?:{_QUOTE})?){_OPAQUE}", rf"\1{HIDDEN}"),
    )
)
"""Forms of secrets in a text, each with what is shown in its place. All take time linear in the text."""


def redact(text: str) -> str:
    """Hide every secret in a text; doing it again changes nothing."""
    names = [name for name in os.environ if name != "PWD" and (_SECRET_NAME.search(name) or _TOKEN_NAME.search(name))]
    for value in sorted({os.environ.get(name, "") for name in names}, key=len, reverse=True):
        if len(value) >= _SHORTEST_OF_ENVIRONMENT:
            text = text.replace(value, HIDDEN)
    for pattern, shown in RULES:
        text = pattern.sub(shown, text)
    return text


def redact_argument(text: str) -> str:
    """Hide the secrets of an argument of a command line, and all of a `pipe:` but its program and tars."""
    before, *commands = _PIPE.split(text)
    return redact(before) + " ".join(f"pipe:{_program_and_tars(command)}" for command in commands)


def redacted(value: Any, name: str = "") -> Any:
    """Return plain nested values, under the key `name`, with every secret in them hidden."""
    is_secret = _SECRET_NAME.search(name) is not None
    if isinstance(value, Mapping):
        return {key: redacted(inner, name if is_secret else str(key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, str):
        is_token = _TOKEN_NAME.search(name) is not None and _OPAQUE_VALUE.fullmatch(value) is not None
        return HIDDEN if value and (is_token or is_secret) else redact_argument(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return HIDDEN if is_number and is_secret else value


def printable(text: str, *, kept: str = "") -> str:
    """A text from outside as a terminal takes it: what cannot be printed, and is not kept, is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def logged(text: str) -> str:
    """A message as it is shown: secrets hidden, no control characters but ends of lines, of bounded length."""
    return printable(shortened(redact(text), LONGEST_LOGGED), kept="\n\t")


def shortened(text: str, longest: int) -> str:
    """A text that comes from outside at a length that a message can hold: its beginning and its end."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}[... {len(text) - longest // 2 * 2} characters ...]{text[-(longest // 2) :]}"


def redact_record(record: logging.LogRecord) -> bool:
    """Hide secrets in a record, and shorten what is too long to read; a filter of handlers."""
    record.msg, record.args = logged(record.getMessage()), None
    return True


def show_log(level: int) -> None:
    """Show on stderr, as plain lines, what this library logs from `level` on and the warnings of others, redacted."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.captureWarnings(True)  # so that they appear above the progress bar
    for handler in logging.getLogger().handlers:
        handler.addFilter(redact_record)
    logging.getLogger("cascade_train").setLevel(level)


@contextmanager
def log_shown(level: int) -> Iterator[None]:
    """Show the log as `show_log` does for the block; then handlers, level and warnings are as they were."""
    root, ours = logging.getLogger(), logging.getLogger("cascade_train")
    filters = {handler: [*handler.filters] for handler in root.handlers}
    ours_before, root_before, showing = ours.level, root.level, warnings.showwarning
    show_log(level)
    try:
        yield
    finally:
        if not filters:
            root.handlers.clear()
        for handler, before in filters.items():
            handler.filters[:] = before
        ours.setLevel(ours_before)
        root.setLevel(root_before)
        if warnings.showwarning is not showing:
            logging.captureWarnings(False)


def _program_and_tars(command: str) -> str:
    """Program of a shell command, and those of its words that name tars."""
    program, *words = command.split()
    shown = [name[0] if (name := re.match(r"[\w./+-]+", program)) else HIDDEN]
    if shown[0] != program:
        shown.append(HIDDEN)
    for word in words:
        tar = redact(next((piece for piece in _PIECES.split(word) if _TAR.search(piece)), HIDDEN))
        if (tar, shown[-1]) != (HIDDEN, HIDDEN):
            shown.append(tar)
    return " ".join(shown)
