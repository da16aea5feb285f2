"""S3 on loopback: a server of the whole protocol, and a small one that fails as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BUCKET = "bucket"
REFUSALS = {"busy": (503, "SlowDown"), "forbidden": (403, "AccessDenied"), "teapot": (418, "Teapot")}


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let boto3 find this endpoint, and credentials that nobody else takes."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "never-shown",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's server and yield its address; it holds one empty bucket."""
    from moto.server import ThreadedMotoServer  # seconds

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer(200, self.server.content, b"")

    def do_GET(self) -> None:  # noqa: N802
        fault = self.server.next_fault()
        content = self.server.content
        first, last = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.server.ranges.append((first, last))
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        elif fault == "whole":
            self._answer(200, content)
        elif fault in ("cut", "stall"):
            self._answer(206, part, part[: len(part) // 2], first)
            self.server.released.wait(5 if fault == "stall" else 0)
            self.close_connection = True
        else:
            self._answer(206, part, part, first, etag='"another"' if fault == "changed" else '"first"')

    def _answer(
        self, status: int, content: bytes, sent: bytes | None = None, first: int | None = None, etag: str = '"first"'
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", etag)
        if first is not None:
            end = first + len(content) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(self.server.content)}")
        self.end_headers()
        self.wfile.write(content if sent is None else sent)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class FaultyS3(ThreadingHTTPServer):
    """One object under every name; each GET takes the next fault of the list, and none once it is used up.

    Attributes:
        faults: busy, forbidden, teapot, whole, cut, stall, changed.
        ranges: what was asked for.
    """

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.faults: list[str] = []
        self.ranges: list[tuple[int, int]] = []
        self.released = threading.Event()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that went away."""

    def next_fault(self) -> str | None:
        with self._lock:
            return self.faults.pop(0) if self.faults else None


@contextmanager
def faulty_s3(content: bytes) -> Iterator[FaultyS3]:
    """Run the server that fails."""
    server = FaultyS3(content)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
