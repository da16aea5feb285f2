"""Files of the web arrive whole or not at all, and a damaged one is fetched again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.files.web import WebFile
from tests.loopback_hub import Hub, serving


def test_a_file_is_kept_where_torch_keeps_it_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 5000
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    with serving(Hub(files={"net.pth": content})) as hub:
        file = WebFile(f"{hub.url}/owner/name/resolve/main/net.pth", hashlib.sha256(content).hexdigest())
        assert file.path == Path(torch.hub.get_dir()) / "checkpoints" / "net.pth"
        assert file.size() == len(content)
        assert file.free_bytes() > 0
        hub.faults.extend([70_000, "wrong", "endless"])
        for _ in range(3):  # a cut connection, other bytes, a body that is not announced and has no end
            with pytest.raises(ConfigError, match=r"net.pth: what came has the SHA-256 .*…, not .*…, and was removed"):
                file.fetch()
            assert not list(file.path.parent.iterdir())
        assert hub.endless < 10_000_000, "what is not announced is not read"
        assert file.fetch().read_bytes() == content
        file.path.write_bytes(b"damaged")
        assert file.fetch().read_bytes() == content
        asked = len(hub.requests)
        assert (file.fetch(), file.size()) == (file.path, len(content))
        assert len(hub.requests) == asked
        with pytest.raises(OSError, match="404"):
            WebFile(f"{hub.url}/owner/name/resolve/main/absent.pth", "0" * 64).size()
