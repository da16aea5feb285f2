"""A hub on this machine that speaks what huggingface_hub needs, and misbehaves in downloads when it is told to."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session

COMMIT = "c" * 40


@dataclass
class Hub:
    """One repository `owner/name` at one commit, which is its `main`.

    `files` are its contents by name; those above `lfs_bytes` are announced by SHA-256, others by git's SHA-1. `faults`
    are answered one by one instead of the next requests for a file's content: a number of bytes after which the
    connection is cut, or "wrong" bytes. `refusal` is the answer to everything. `pushed` holds what came by commits, by
    repository and name, `made` what was asked for new repositories.
    """

    files: dict[str, bytes]
    lfs_bytes: int = 1000
    commit: str = COMMIT
    faults: deque[Any] = field(default_factory=deque)
    refusal: tuple[int, dict[str, str]] | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    url: str = ""

    def etag(self, content: bytes) -> str:
        if len(content) > self.lfs_bytes:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", "Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def found(self) -> bytes | None:
        """Return the content that is asked for, or answer that there is none."""
        hub, error = self.hub, {"X-Repo-Commit": self.hub.commit}
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        owner, name, _, revision, *inside = [*self.path.lstrip("/").split("/"), "", "", ""]
        inside = [part for part in inside if part]
        if hub.refusal is not None:
            self.answer(*hub.refusal)
        elif f"{owner}/{name}" != "owner/name":
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", hub.commit):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif "/".join(inside) not in hub.files:
            self.answer(404, error | {"X-Error-Code": "EntryNotFound"})
        else:
            return hub.files["/".join(inside)]
        return None

    def do_HEAD(self) -> None:
        if (content := self.found()) is not None:
            headers = {"ETag": f'"{self.hub.etag(content)}"', "X-Repo-Commit": self.hub.commit}
            self.answer(200, headers | {"Content-Length": str(len(content)), "Accept-Ranges": "bytes"})

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/owner/name/tree/"):
            self.answer_json([self.entry(name, content) for name, content in self.hub.files.items()])
            return
        if (content := self.found()) is None:
            return
        fault = self.hub.faults.popleft() if self.hub.faults else None
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        ranged = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {}
        self.answer(206 if first else 200, {"Content-Length": str(len(content) - first), **ranged})
        rest = bytes(len(content) - first) if fault == "wrong" else content[first:]
        self.wfile.write(rest[:fault] if isinstance(fault, int) else rest)

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        digest, told = self.hub.etag(content), {"type": "file", "path": name, "size": len(content)}
        large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 1}} if len(digest) == 64 else {}
        return told | {"oid": digest[:40]} | large

    def do_POST(self) -> None:
        """Take a new repository, and the four requests of an upload: the card, modes, large files, the commit."""
        body, hub = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.hub
        if hub.refusal is not None:
            self.answer(*hub.refusal)
        elif self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self.answer_json({"url": f"{hub.url}/{hub.made[-1]['organization']}/{hub.made[-1]['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            modes = {True: "lfs", False: "regular"}
            asked = json.loads(body)["files"]
            files = [{"path": each["path"], "uploadMode": modes[each["size"] > hub.lfs_bytes]} for each in asked]
            self.answer_json({"files": [each | {"shouldIgnore": False} for each in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{hub.url}/store/{each['oid']}"}} for each in objects]
            found = [each | {"actions": action} for each, action in zip(objects, actions, strict=True)]
            self.answer_json({"transfer": "basic", "objects": found})
        else:
            repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for key, value in ((row["key"], row["value"]) for row in map(json.loads, body.splitlines())):
                if key != "header":
                    content = base64.b64decode(value["content"]) if key == "file" else hub.stored[value["oid"]]
                    hub.pushed.setdefault(repo, {})[value["path"]] = content
            self.answer_json({"commitUrl": f"{hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})

    def do_PUT(self) -> None:
        self.hub.stored[self.path.removeprefix("/store/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {})

    def answer_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.answer(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def point_to(hub: Hub, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's huggingface_hub ask this hub, as HF_ENDPOINT would, with an empty cache."""
    constants = huggingface_hub.constants
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(cache)}
    for name, value in {**values, "HF_HUB_OFFLINE": False, "DOWNLOAD_CHUNK_SIZE": 1000}.items():
        monkeypatch.setattr(constants, name, value)
    close_session()
