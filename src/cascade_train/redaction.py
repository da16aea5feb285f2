"""Hides passwords, tokens and keys in every text and configuration that is written or shown.

Every writer of a file, a log line or a tracker calls these functions. Configurations that differ only in a secret are
equal afterwards. A false positive would make two different settings equal, so each rule demands a form that nothing
else has. Options of a `pipe:` command, and of `run.on_end`, may hold a secret in any form: only its program and tars
are shown.

Texts come from outside: every rule takes time linear in the length of the text. A repeat that may fail after it
matched is bounded, and a rule begins with a fixed word, not with what may precede that.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

HIDDEN = "<redacted>"
LONGEST_LOGGED, LONGEST_NAME, LONGEST_REASON = 20_000, 200, 1000
"""Characters of a log line, of a name from outside, and of what is wrong with it, before they are shortened."""

_BEGINS = r"(?<![^\W_])"  # a word, or a part of a name behind _, . or -
_PASSWORD = r"pass(?:word|wd|phrase)"
_COMPOUND = (
    rf"{_BEGINS}(?:access|account|api|app|auth|client|deploy|hf|hub|id|job|personal|private|refresh|secret|security"
    r"|session|signing|wandb)[_-]?(?:key|token|secret)(?:[_-]?id)?"
)
_WORD = rf"{_BEGINS}(?:authorization|bearer|cookies?|credentials?|jwt|pwd|secrets?)"
_SECRET = rf"(?=[abcdhijprsw])(?:{_PASSWORD}|{_COMPOUND}|{_WORD})"
"""Names whose value is a secret, whatever it looks like."""

_HEADER = r"(?<=[a-z0-9])-(?:auth|key|secret|session|token)"
"""How headers of services end: `X-Vault-Token`."""

_TOKEN = rf"(?=[st]){_BEGINS}(?:sig(?:nature)?|token)"
"""Names whose value is a secret where it looks like one."""

_OPAQUE = r"(?=[^\s\"'&;,\d]{0,32}\d)[\w./+=~%:-]{12,}"
"""What a token looks like: long, one word, with a digit. `pad_token: <pad>` and a token to train do not."""

_QUOTE = r"\\?[\"']"
_ASSIGNED = rf"(?:\s{{1,4}}=\s{{1,4}}|=|{_QUOTE}\s{{0,4}}:\s{{0,4}})"
_COLON = rf"(?:{_QUOTE})?\s{{0,4}}:\s{{0,4}}"
_VALUE = rf"(?:({_QUOTE})[^\"'\r\n]+|[^\s\"'&]+)"
_WORD_VALUE = rf"(?:({_QUOTE})[^\"'\r\n]+|[^\s\"'-][^\s\"']*)"
_OPTION = r"-(?<!\S-)-?(?:[\w.-]{0,20}[_.-])?"
_SHORTEST_OF_ENVIRONMENT = 12
_END_OF_NAME = 100

_SECRET_NAME = re.compile(rf"(?:{_SECRET}|{_HEADER})\Z", re.IGNORECASE)
_TOKEN_NAME = re.compile(rf"{_TOKEN}\Z", re.IGNORECASE)
_OPAQUE_VALUE = re.compile(_OPAQUE)
_TAR = re.compile(r"\.(?:tar|tgz|tbz2|txz)(?![a-z])", re.IGNORECASE)
_PIECES = re.compile(r"[\s=?#&|;'\"()`$\\]+")
_PIPE = re.compile(r"([\"']|(?<=[\[,])|)(?:pipe:|\bon_end\s{0,4}[=:]\s{0,4})(?=\S)", re.IGNORECASE)


class Rule(NamedTuple):
    """A form that secrets have: replaces `pattern` by `shown` in a text that has one of `words`, in small letters."""

    words: tuple[str, ...]
    pattern: re.Pattern[str]
    shown: str


def _rule(words: str, pattern: str, shown: str = HIDDEN) -> Rule:
    return Rule(tuple(words.split()), re.compile(pattern, re.IGNORECASE | re.DOTALL), shown)


_KEPT, _KEPT_QUOTE = rf"\1{HIDDEN}", rf"\1\2{HIDDEN}"
_SECRETS, _TOKENS = "auth bearer cookie credential jwt key pass pwd secret session token", "sig token"

RULES = (
    # Forms that issuers chose so that they can be found.
    _rule("hf_", r"\b(?-i:hf_)[a-z0-9]{16,}"),
    _rule("akia asia", r"\b(?-i:(?:AKIA|ASIA)[A-Z0-9]{16})\b"),
    _rule(
        "gho_ ghp_ ghs_ ghu_ ghr_ github_pat_ glpat- xox wandb_v",
        r"\b(?-i:gh[opsur]_|github_pat_|glpat-|xox[abprs]-|wandb_v\d{1,3}_)[\w-]{16,}",
    ),
    _rule("sk-", r"\b(?-i:sk-)(?=[\w-]{0,64}\d)[\w-]{20,}"),
    _rule("aiza", r"\b(?-i:AIza)[\w-]{35}"),
    _rule("eyj", r"(?<![\w-])(?-i:eyJ)[\w-]{8,}+\.[\w-]{8,}(?:\.[\w-]*)?"),
    _rule("-----begin", r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"),
    # What a url carries before its host and behind its question mark.
    _rule("://", r"(://)[^\s/?#\"']+@", rf"{_KEPT}@"),
    _rule(
        "? &",
        rf"([?&](?:[\w.-]{{0,40}}[_.-])?(?:{_SECRET}|{_TOKEN}|auth|awsaccesskeyid|expires|key|x-(?:amz|goog)-[a-z-]{{1,40}})"
        r"=)[^\s&\"']+",
        _KEPT,
    ),
    # What headers and commands carry.
    _rule("authorization", r"(\bauthorization\s{0,4}:\s{0,4})(?:[\w-]{1,40}\s{1,4})?[^\s\"']+", _KEPT),
    _rule("bearer", r"(\bbearer\s{1,4})(?=[\w.~+/=-]{0,64}\d)[\w.~+/=-]{12,}", _KEPT),
    _rule("cookie", r"(\bcookie\s{0,4}:\s{0,4})(?=[^\s=;\"']{1,64}=)[^\"'\r\n]+", _KEPT),
    _rule("-b", rf"((?<!\S)-b\s?)(?=[\\\"']{{0,2}}[^\s=;\"']{{1,64}}=){_VALUE}", _KEPT_QUOTE),
    _rule("-u", rf"((?<!\S)-(?:u|-user|-proxy-user)[ =]{{0,2}}(?:{_QUOTE})?)[^\s:\"'/]{{1,200}}:[^\s\"']+", _KEPT),
    _rule("sshpass", rf"(\bsshpass\s{{1,4}}(?:-[ev]\s{{1,4}}){{0,2}}-p\s{{0,4}}){_VALUE}", _KEPT_QUOTE),
    _rule("wandb", r"(\bwandb\s{1,4}login(?:\s{1,4}--\S{1,40}){0,4}\s{1,4})\w{20,}", _KEPT),
    # A name and its value.
    _rule(_SECRETS, rf"({_SECRET}{_ASSIGNED}){_VALUE}", _KEPT_QUOTE),
    _rule(_SECRETS, rf"((?=[acdhijprsw-])(?:{_PASSWORD}|{_COMPOUND}|{_HEADER}){_COLON}){_VALUE}", _KEPT_QUOTE),
    _rule(
        f"{_SECRETS} {_TOKENS}",
        rf"((?=[abcjpst])(?:{_WORD}|{_TOKEN})(?:{_ASSIGNED}|{_COLON})(?:{_QUOTE})?){_OPAQUE}",
        _KEPT,
    ),
    _rule(_SECRETS, rf"({_OPTION}{_SECRET}\s{{1,4}}){_WORD_VALUE}", _KEPT_QUOTE),
    _rule(_TOKENS, rf"({_OPTION}{_TOKEN}\s{{1,4}}(?:{_QUOTE})?){_OPAQUE}", _KEPT),
)


def redact(text: str) -> str:
    """Return a text with every secret in it hidden; doing it again changes nothing.

    Hidden are the forms of known issuers, what a url carries before its host and as its signature, authorization in
    commands and headers, values behind names of secrets, and the values of this process's secret environment variables.
    """
    names = [name for name in os.environ if name != "PWD" and (_names_secret(name) or _names_token(name))]
    for value in sorted({os.environ.get(name, "") for name in names}, key=len, reverse=True):
        if len(value) >= _SHORTEST_OF_ENVIRONMENT:
            text = text.replace(value, HIDDEN)
    small = text.lower()
    for rule in RULES:
        if any(word in small for word in rule.words):
            text = rule.pattern.sub(rule.shown, text)
    return text


def redact_argument(text: str) -> str:
    """Return an argument of a command line, or a value, with its secrets and the options of commands hidden."""
    shown, begin = [], 0
    while (found := _PIPE.search(text, begin)) is not None:
        end = _end_of_command(text, found)
        shown += [text[begin : found.end()], _program_and_tars(text[found.end() : end])]
        begin = end
    return redact("".join([*shown, text[begin:]]))


def redacted(value: Any, name: str = "") -> Any:
    """Return plain nested values, under the key `name`, with every secret in them hidden."""
    if isinstance(value, Mapping):
        below = name if _names_secret(name) else None
        return {key: redacted(inner, below or str(key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [redacted(inner, name) for inner in value]
    if isinstance(value, str) and name == "on_end":
        return _program_and_tars(value)
    if isinstance(value, str):
        is_token = _names_token(name) and _OPAQUE_VALUE.fullmatch(value) is not None
        return HIDDEN if value and (is_token or _names_secret(name)) else redact_argument(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return HIDDEN if is_number and _names_secret(name) else value


def printable(text: str, *, kept: str = "") -> str:
    """Return a text from outside as a terminal takes it: what cannot be printed, and is not kept, is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def logged(text: str) -> str:
    """Return a message as it is shown: secrets hidden, no control characters but ends of lines, of bounded length."""
    return printable(shortened(redact(text), LONGEST_LOGGED), kept="\n\t")


def shortened(text: str, longest: int) -> str:
    """Return a text that comes from outside at a length that a message can hold: its beginning and its end."""
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
    """Return what is shown of a shell command; of all else, that there is something."""
    program, *words = command.split() or [""]
    name = re.match(r"[\w./+-]*", program)
    assert name is not None
    shown = [name[0]] if name[0] == program else [name[0], HIDDEN]
    for word in words:
        tar = next((piece for piece in _PIECES.split(word) if _TAR.search(piece)), HIDDEN)
        if (tar, shown[-1]) != (HIDDEN, HIDDEN):
            shown.append(tar)
    return " ".join(shown)


def _end_of_command(text: str, found: re.Match[str]) -> int:
    """Return where a `pipe:` command ends: at its quote, at the next element of a list without quotes, or never."""
    end = rf"(?<!\\){found[1]}" if found[1] else None
    if end is None and text[found.start() - 1 : found.start()] in ("[", ","):
        end = r"[,\]]"
    stop = re.compile(end).search(text, found.end()) if end else None
    return stop.start() if stop else len(text)


@functools.lru_cache(maxsize=4096)
def _names_secret(name: str) -> bool:
    return _SECRET_NAME.search(name[-_END_OF_NAME:]) is not None


@functools.lru_cache(maxsize=4096)
def _names_token(name: str) -> bool:
    return _TOKEN_NAME.search(name[-_END_OF_NAME:]) is not None
