"""Requirements of filters: files that a user brings, and optional libraries."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError, install_hint
from cascade_train.files.hub import parse_source, unavailable
from cascade_train.files.untrusted import COPY, check_floating, parsing

Session = Any
"""onnxruntime's `InferenceSession`; the library has no types."""

PACKAGES = {"cv2": "OpenCV", "onnxruntime": "onnxruntime"}
"""Usual names of the libraries of the extra `filters`."""


def require(library: str) -> None:
    """Raise a ConfigError that names the extra where a library is not installed; does not import it."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"task.filter: needs {PACKAGES[library]}, which is not installed. {install_hint('filters')}.")


@cache
def opencv() -> Any:
    """Import OpenCV on one thread: its threads do not survive a fork."""
    import cv2

    cv2.setNumThreads(0)
    return cv2


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """A file that a user has to bring."""

    key: str  # the configuration key that names it
    what: str  # description
    usual_name: str  # file name under which it is published
    licence: str
    found: str  # where it is published

    def __str__(self) -> str:
        return f"It is {self.what}, usually {self.usual_name} (licence: {self.licence}), found at {self.found}."


def find_file(source: str, known: WeightsFile) -> Path:
    """Path of a local file, or of `owner/name:file` on the hub; else a ConfigError."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    on_hub = parse_source(source)
    if on_hub is None or not on_hub.inside:
        raise ConfigError(f"{known.key}={source}: no such file; give a path, or owner/name:file on the hub. {known}")
    try:
        return on_hub.fetch(on_hub.inside)
    except Exception as error:  # of the hub or the network
        raise ConfigError(f"{unavailable(f'{known.key}={source}', error)}. {known}") from error


def load_weights(module: nn.Module, source: str, known: WeightsFile, *, device: torch.device) -> None:
    """Load a module in fp32 from safetensors or a pickle of tensors; a ConfigError if they do not fit."""
    path = find_file(source, known)
    state = read_tensors(path, known)
    state = {name.removeprefix("module."): value for name, value in state.items()}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        first = [line.strip() for line in str(error).splitlines()][1]
        raise ConfigError(f"{known.key}={path}: holds other weights than these ({first}). {known}") from error
    module.to(device)


def read_tensors(path: Path, known: WeightsFile) -> dict[str, Tensor]:
    """Read tensors by name, without running code; a ConfigError where there are none."""
    with parsing(f"{known.key}={path}:", "is neither safetensors nor a pickle of tensors", f"{COPY}. {known}"):
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in state.items()):
        raise ConfigError(f"{known.key}={path}: holds something else than tensors by name. {known}")
    for name, value in state.items():
        check_floating(name, value, f"{known.key}={path}")
    return state


@cache
def open_session(source: str, known: WeightsFile) -> Session:
    """Open a network once in each process, on one thread; a ConfigError if it cannot be run."""
    import onnxruntime

    path = find_file(source, known)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no common base class of its own
        first = str(error).splitlines()[0]
        raise ConfigError(f"{known.key}={path}: onnxruntime cannot run this file ({first}). {known}") from error
