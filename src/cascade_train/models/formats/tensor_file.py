"""Writing safetensors files: equal content gives equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and the facts of the header, these in the order of their names (safetensors shuffles them)."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata))
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)) | {"__metadata__": dict(sorted(metadata.items()))}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) != size:
            raise AssertionError(f"the header of {path} has {size} bytes, not {len(text)}")
        file.seek(8)
        file.write(text)
