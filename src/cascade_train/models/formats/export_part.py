"""A frozen part's weights out, such as a compressor that was trained: one file under the part's own names, read back.

Takes plain state dicts, gathered from their shards by the caller, on one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.models.formats.export import check_equal_tensors, replaced_directory

PART_FILE = "model.safetensors"
"""What is looked for in the folder of a part."""


def save_part(state: Mapping[str, Tensor], directory: Path) -> float:
    """Write `model.safetensors` into a folder that replaces `directory` at once; return 0, no tensor differs.

    Args:
        state: the module's whole state dict, on the host.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    tensors = {name: value.contiguous() for name, value in state.items()}
    with replaced_directory(directory) as partial:
        save_file(tensors, partial / PART_FILE, metadata={"format": "pt"})
        check_equal_tensors(tensors, load_file(partial / PART_FILE), directory)
    return 0.0
