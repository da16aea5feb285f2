"""Networks stored as ONNX, opened for one thread: data workers each have a core of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cascade_train.errors import ConfigError
from cascade_train.filters.parts.files import WeightsFile

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


@cache
def open_session(path: Path, known: WeightsFile) -> InferenceSession:
    """Open a network once in each process, on one thread.

    Raises:
        ConfigError: the file is no network that onnxruntime can run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each cause, and no common one of its own
        first = str(error).splitlines()[0]
        raise ConfigError(f"{known.key}={path}: onnxruntime cannot run this file ({first}). {known}") from error
