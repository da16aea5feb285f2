"""Write samples as a tar of the webdataset layout. Reading lives in webdataset.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cascade_train.files.durable import replacing


def write_tar(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Write one tar under another name and move it into place; the same samples give the same bytes.

    Args:
        path: of the tar.
        samples: each has `__key__` and its parts by extension: bytes, text, or what webdataset encodes.

    Returns:
        The path.
    """
    from webdataset import TarWriter  # takes seconds to import

    with replacing(path) as partial, TarWriter(str(partial), mtime=0) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path
