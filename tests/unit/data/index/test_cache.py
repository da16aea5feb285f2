"""The cache of indexes; one that may not be read or written is no reason to stop, and earlier ones are used."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from cascade_train.data.index.cache import write_cache
from cascade_train.errors import Interrupted


def test_a_write_that_is_stopped_or_fails_leaves_nothing(tmp_path, monkeypatch):
    def end(error):
        def savez(file, **parts):
            file.write_bytes(b"half")
            raise error

        monkeypatch.setattr(np, "savez", savez)

    end(Interrupted("Stopped by SIGTERM before the first step.", code=75))
    with pytest.raises(Interrupted):
        write_cache(tmp_path / "a.npz", {}, required=False)
    end(OSError(errno.ENOSPC, "No space left on device"))
    write_cache(tmp_path / "a.npz", {}, required=False)
    assert list(tmp_path.iterdir()) == []
