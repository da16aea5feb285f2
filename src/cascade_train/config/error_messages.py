"""Errors as one paragraph on rank 0 and an exit code."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.groups import (
    NESTED,
    did_you_mean,
    group_form,
    group_options,
    groups,
    key_paths,
    nearest,
    options_with,
    unknown_hint,
)
from cascade_train.config.overrides import quoted_form, refusal, whole_number
from cascade_train.config.schema import COMPONENTS, Root
from cascade_train.errors import (
    INTERRUPTED,
    LESS_MEMORY,
    STOPPED,
    ConfigError,
    Interrupted,
    RunError,
    is_lost_peer,
    line_of_user,
    unwritten,
)
from cascade_train.redaction import logged
from cascade_train.signals import handling

SECONDS_FOR_RANK_ZERO = 10.0
"""torchrun ends all ranks with the first that exits; the other ranks wait until rank 0 has reported."""

NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Unable to allocate .* for an array"
)
"""What torch, CUDA's libraries and numpy raise where memory runs out outside of torch's allocator for CUDA."""

FEW = 6
"""Keys of a component that are all listed, rather than a key of the same name elsewhere."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def exit_code(action: Callable[[], Any], *, remedy: str = "") -> int:
    """Run `action`, report its errors, and return its exit code.

    An error of all ranks is one paragraph on rank 0, one of a single rank is a paragraph of that rank.

    The code is that of the action, None = 0; 1 after a runtime failure or a defect (traceback with the rank), 2 for an
    invalid configuration, 130 after Ctrl-C, or that of an `Interrupted`. `remedy` follows the message of these two.
    """
    try:
        return noted(int(action() or 0))
    except (Exception, KeyboardInterrupt) as error:
        return code_of(error, remedy=remedy)


def noted(code: int) -> int:
    """Return an exit code; that of an orderly stop is noted for torchrun."""
    if code == STOPPED:
        _write_error_file("Stopped as asked, and saved. The same command continues.")
    return code


def code_of(error: Exception | KeyboardInterrupt, *, remedy: str = "") -> int:
    """Report an error, and return the exit code that it stands for, as `exit_code` does."""
    origin: BaseException | None = error  # a library may have made an error of an interrupt
    while origin is not None and not isinstance(origin, KeyboardInterrupt):
        origin = origin.__cause__ or origin.__context__
    if origin is None:
        assert isinstance(error, Exception), "an interrupt is its own origin"
        return _report(_with_remedy(error))
    text, is_ours = str(origin), isinstance(origin, Interrupted)
    if os.environ.get("RANK", "0") == "0":
        _say(f"{text or 'Interrupted.'} {remedy if is_ours or not text else ''}".rstrip())
    return origin.code if isinstance(origin, Interrupted) else INTERRUPTED


def _with_remedy(error: Exception) -> Exception:
    """Return what torch raises where memory runs out, with the remedy; others as they are."""
    is_torchs = type(error).__name__ == "OutOfMemoryError"  # which is not imported here
    if is_torchs or (isinstance(error, RuntimeError | MemoryError) and NO_MEMORY.search(str(error))):
        reason = _one_line(error).partition(". Of the allocated")[0].rstrip(".")
        return RunError(f"{reason}. Needs less memory: {LESS_MEMORY}. cascade-train plan says what needs how much.")
    return error


def in_our_words(error: Exception) -> Exception:
    """Return the error of this library that says what another one's means; ours, and defects, as they are."""
    error = _with_remedy(error)
    text = None if isinstance(error, ConfigError | RunError) else paragraph_of(error)
    if text is None:
        return error
    return (RunError if _is_of_runtime(error) else ConfigError)(logged(text))


def _is_of_runtime(error: Exception) -> bool:
    is_of_disk = isinstance(error, OSError) and error.errno in (*NO_ROOM, errno.EROFS)
    return is_of_disk or isinstance(error, BrokenPipeError | RuntimeError)


def _report(error: Exception) -> int:
    rank = os.environ.get("RANK", "0")
    paragraph = paragraph_of(error)
    if paragraph is None:
        error.add_note(f"on rank {rank}")
        if line := line_of_user(error):
            sys.stderr.write(logged(f"{line}{type(error).__name__}: {_one_line(error)}\n"))
        sys.stderr.write(logged("".join(traceback.format_exception(error))))
        _write_error_file(logged(repr(error)))
        return 1
    if rank == "0":
        _say(logged(paragraph))
    elif (isinstance(error, RunError) and not error.shared) or (rank == "1" and is_lost_peer(error)):  # rank 0's, maybe
        _say(f"[rank {rank}] {logged(paragraph)}")
    elif {"TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        if os.environ.get("LOCAL_RANK") == "0":  # on another machine than rank 0, with a torchrun of its own
            _write_error_file(logged(paragraph))
        with handling(lambda *_: os._exit(0)):  # torchrun ends this rank with rank 0, and lists those with other codes
            time.sleep(SECONDS_FOR_RANK_ZERO)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # else srun lets the other ranks live when rank 0 has reported
            _say(f"[rank {rank}] {logged(paragraph)}")  # rank 0 has not failed, so that this is of this rank alone
    return 1 if _is_of_runtime(error) else 2


def _say(paragraph: str) -> None:
    sys.stderr.write(f"{paragraph}\n")
    _write_error_file(paragraph)


def _write_error_file(paragraph: str) -> None:
    """Write a message for torchrun's report, in the form of torch.distributed.elastic.multiprocessing.errors."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": paragraph, "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def paragraph_of(error: Exception) -> str | None:
    """Return one paragraph on a wrong configuration or a runtime failure; None for a defect."""
    match error:
        case ConfigError() | RunError():
            return str(error)
        case HydraException():
            return _composing(error)
        case OmegaConfBaseException():
            return _value(error)
        case yaml.YAMLError():
            return f"A configuration file is not valid YAML: {_one_line(error)}"
        case RuntimeError() if is_lost_peer(error):
            return (
                "The connection to another rank was lost: it has ended, and its output says why; it was killed, as the"
                " system does when memory runs out; or it hangs, for longer than run.timeout_seconds. The same command"
                " continues from the newest checkpoint."
            )
        case OSError() if error.errno in NO_ROOM:
            what = unwritten(Path(error.filename), error) if error.filename else f"A file could not be written: {error}"
            return f"{what}. Free space there, or give another folder."
        case OSError() if error.errno in (errno.EROFS, errno.EACCES) and error.filename:
            remedy = ", or change its permissions" if error.errno == errno.EACCES else ""
            return f"{error.filename}: {error.strerror}. Choose another folder{remedy}."
        case BrokenPipeError():
            return "The output was closed."
        case ValueError():
            return _flags(error)
    return None


def _composing(error: HydraException) -> str | None:
    match error:
        case InstantiationException():  # of what Hydra makes itself, such as a launcher
            return str(error.__cause__) if isinstance(error.__cause__, ValueError) else None
        case OverrideParseException():
            return refusal(error.override)
        case MissingConfigException():
            return _missing_option(error)
    return _composition(error)


def _flags(error: ValueError) -> str | None:
    """Return a paragraph on a ValueError that Hydra raises; None for a defect."""
    text = f"{_one_line(error).rstrip('.')}."
    if text.startswith("Config group override must be"):
        return f"A group is chosen by the name of an option: {text}"
    return text if text.startswith(("Only one of --run", "The --resolve flag")) else None


def _missing_option(error: MissingConfigException) -> str:
    name = str(error.missing_cfg_file or "")
    group, _, option = name.rpartition("/")
    options = [o for o in error.options or () if not o.startswith("_")]
    if not group:
        return f"The configuration file {name!r} was not found. {_one_line(error)}"
    hint = nearest(option, options) or (other_name(option) if " " in other_names().get(option, "") else "")
    return f"{group}={option} is not an option of {group}.{hint} Options: {', '.join(options)}."


def _composition(error: HydraException) -> str:
    text, cause = str(error), error.__cause__ or error.__context__
    if choose := re.search(r"^(?:In '.*':\s)?You must specify '([^']+)'.*?\nAvailable options:(.*)", text, re.DOTALL):
        options = ", ".join(f"{choose[1]}={option}" for option in choose[2].split() if not option.startswith("_"))
        in_file = f"The defaults of an experiment's file choose it by - override /{choose[1]}: <name>."
        return f"{choose[1]} is not chosen. Choose one: {options}. {in_file}"
    unknown = re.match(r"(?:In '.*': )?Could not override '([^']+)'", text)
    no_group = re.search(r"config group '([^']+)' does not exist", text)
    if no_group := unknown if "No match in the defaults list" in text else no_group:
        group, _, path = no_group[1].partition("@")
        if no_group[1] in NESTED.values():
            return f"{group}= chooses {path}, which the chosen {path.partition('.')[0]} does not have."
        near = did_you_mean(group, groups())
        return f"{no_group[1]} is not a group of this configuration.{near}"
    if unknown:
        return unknown_key(unknown[1], cause)
    if not isinstance(cause, OmegaConfBaseException):
        return _ambiguous(text)
    merging = re.match(r"Error merging override (.+)", text, re.DOTALL)
    if (above := re.match(r"In '((\w+)/.+?)'", text)) and above[2] == str(cause.full_key):
        return f"{above[1]}.yaml sets keys of the whole configuration: begin the file with # @package _global_"
    return _value(cause, merging[1]) if merging else f"{text.partition(': ')[0]}: {_value(cause)}"


def _value(error: OmegaConfBaseException, override: str = "") -> str:
    """Return a paragraph on a value that does not fit its typed key."""
    key = str(error.full_key or "") or "A value of the configuration"
    given = override.partition("=")[2]
    if key == "train.precision" and re.search(r"fp16|float16|half", f"{given} {error}"):
        return (
            f"{key}=fp16 is refused: activations of Stage C and of some autoencoders overflow its range, and no loss "
            f"is scaled here. Use {key}=bf16, or fp32 for tiny models."
        )
    if key in COMPONENTS and override:
        return f"{override} is not a component. {group_form(key, given)}"
    message = str(error).splitlines()[0].rstrip(".")
    parent = error.parent_node
    if message.startswith("Key ") and isinstance(parent, DictConfig):
        if "." in str(error.key):
            return f"{key} is one key in YAML, dot and all. Write one level to a line, the inner ones indented."
        return unknown_key(key, error)
    if message.startswith("Interpolation"):
        return f"{key} refers to a key that is not there: {message}."
    if enum := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", message):
        is_word = enum[1] in {"True", "False"}
        hint = " YAML reads a bare off, on, yes or no as true or false: quote it." if is_word else ""
        return f"{key}={enum[1]} must be one of {enum[2]}.{hint}"
    if number := re.fullmatch(r"Value '(.*)' of type '.*' could not be converted to Integer", message):
        return whole_number(key, given or number[1])
    return _wrong_kind(key, given, message)


def _wrong_kind(key: str, given: str, message: str) -> str:
    if "is not Optional" in message:
        return f"{key} must not be null or empty."
    if wanted := re.search("is not a subclass of (.*?)\\.", message):
        for name, node in get_type_hints(Root).items():
            if node.__name__ == wanted[1]:
                below = ", ".join(f"{name}.{each}" for each in node.__annotations__)
                return f"{name} takes no value: there are keys below it, {below}."
        return f"{key} takes no value: there are keys below it."
    if "is not a ListConfig" in message:
        form = quoted_form(f"{key}=[{given}]") if given else None
        return f"{key}{f'={given}' if given else ''} must be a list.{f' Write: {form}' if form else ''}"
    return f"{key}{f'={given}' if given else ''} has a wrong value: {message}."


def _ambiguous(text: str) -> str:
    if not (ambiguous := re.match(r"Ambiguous value for argument '(.*?)'\n1\.", text, re.DOTALL)):
        return " ".join(text.split())
    key, _, value = ambiguous[1].partition("=")
    return (
        f"{ambiguous[1]!r} holds several values. To train once with each, add --multirun. As one text, write: "
        f"""{quoted_form(f'{key}="{value}"')}; where the key takes a list, write: {quoted_form(f"{key}=[{value}]")}."""
    )


def unknown_key(path: str, cause: BaseException | None) -> str:
    """Return one paragraph on an unknown key and OmegaConf's error: the nearest key, an option that has it, or ours."""
    parent = getattr(cause, "parent_node", None)
    if not isinstance(parent, DictConfig):
        return f"{path} is unknown.{other_name(path.rpartition('.')[2]) or did_you_mean(path, groups())}"
    known, node = [str(key) for key in parent if key != "hydra"], parent._get_full_key(None)
    if not path.startswith(f"{node}." * bool(node)):  # a mapping was given, and the unknown key is in that
        path = str(getattr(cause, "full_key", path))
    root: Any = parent._get_root()
    plain: Any = OmegaConf.to_container(root, resolve=False)
    rest = path.removeprefix(f"{node}." * bool(node))
    beside = did_you_mean(rest.partition(".")[0], known, f"{node}.") if node else ""
    if node in groups():
        beside = unknown_hint(node, rest, known)
    name = path.rpartition(".")[2]
    if f"{name}@{path}" in NESTED.values():
        return f"{path} is unknown. {group_form(path, None)}"
    if not beside.startswith(" It is a key of "):
        near = beside if beside.startswith(" Did you mean") else ""
        same = [key for key in key_paths(plain) if key.rpartition(".")[2] == name and not key.startswith("hydra")]
        if node in groups() and len(known) < FEW:
            near = near or beside
        elsewhere = f" Did you mean {' or '.join(same[:3])}?" if same else ""
        root_key, _, below = path.partition(".")
        if owners := options_with(root_key, below):
            elsewhere = f" It is a key of {' and '.join(f'{root_key}={option}' for option in owners)}."
        anywhere = did_you_mean(path.partition(".")[0], sorted({*known, *groups()}))
        beside = other_name(name, plain) or near or elsewhere or beside or anywhere
    return f"{path} is unknown.{beside}"


def other_name(name: str, cfg: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a sentence with our key for a name that other trainers use, and its meaning; empty where there is none."""
    from cascade_train.config.help import meaning_of

    ours = other_names().get(name.lower().lstrip("-").replace("-", "_"))
    if ours is None or " " in ours:
        return f" {ours}" if ours else ""
    group, _, key = ours.partition(".")
    meaning = meaning_of(ours, cfg)
    options = [] if meaning or not key else options_with(group, key)
    if 0 < len(options) < len(group_options(group)):
        meaning = f"It is a key of {' and '.join(f'{group}={option}' for option in options)}"
    return f" Did you mean {ours}?{f' {meaning[0].upper()}{meaning[1:].rstrip(chr(46))}.' if meaning else ''}"


@functools.cache
def other_names() -> dict[str, str]:
    """Return what other trainers call a key, by that name: our key, or a sentence."""
    names = yaml.safe_load(Path(__file__).with_name("unknown_keys.yaml").read_text(encoding="utf-8"))
    return {name: ours for ours, all_names in names.items() for name in all_names.split()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
