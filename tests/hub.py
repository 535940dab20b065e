"""A Hugging Face hub of our own on loopback: the three kinds of requests that downloading makes, with ranges.

It stands in for the real hub, which tests cannot reach and which could not be made to break off in the middle.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34
PIECE = 64 * 1024


class FakeHub:
    """Repositories by name: files by name. `large` files are served as Git LFS objects with a SHA-256.

    break_after: a large file's transfer is cut off once that many of its bytes were sent, the next `breaks` times.
    hold_after: it stands still there until the hub ends.
    token: who does not show it gets 401. spoil: names whose bytes arrive altered. storage: URL of a server that large
    files come from. shown: Authorization headers of requests for files.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]], large: tuple[str, ...] = ()) -> None:
        self.repositories, self.large = repositories, large
        self.break_after, self.breaks, self.token, self.spoil = 0, 0, "", set[str]()
        self.sent: dict[str, int] = {}
        self.hold_after, self.storage = 0, ""
        self.shown: list[str | None] = []
        self.broke, self._over = threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = urlsplit(request.path).path.strip("/").removeprefix("datasets/").split("/")
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self._say(request, 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b"{}", body)
        elif parts[0] == "api" and (name := "/".join(parts[2:4])) in self.repositories:
            content = json.dumps(self._info(name)).encode()
            self._say(request, 200, {"Content-Type": "application/json"}, content, body)
        elif "resolve" in parts and "/".join(parts[:2]) in self.repositories:
            self._file(request, "/".join(parts[:2]), "/".join(parts[4:]), body)
        else:
            self._say(request, 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"}, b"{}", body)

    def _info(self, name: str) -> dict[str, object]:
        siblings = []
        for file, content in self.repositories[name].items():
            entry: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": _git(content)}
            if file in self.large:
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}

    def _file(self, request: BaseHTTPRequestHandler, name: str, file: str, body: bool) -> None:
        content = self.repositories[name].get(file)
        if content is None:
            self._say(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
            return
        self.shown.append(request.headers.get("Authorization"))
        if self.storage and file in self.large:
            self._say(request, 302, {"Location": f"{self.storage}{request.path}"}, b"", body)
            return
        etag = hashlib.sha256(content).hexdigest() if file in self.large else _git(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if file in self.spoil:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, start = 200, 0
        if wanted := request.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._say(request, status, headers, content[start:], body, file)

    def _say(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        body: bool,
        file: str = "",
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not body:
            return
        for offset in range(0, len(content), PIECE):
            if file in self.large and self.breaks and offset >= self.break_after:
                self.breaks -= 1
                self.broke.set()
                request.close_connection = True
                request.connection.close()
                return
            if file in self.large and self.hold_after and offset >= self.hold_after:
                self._over.wait(60)
                return
            piece = content[offset : offset + PIECE]
            try:
                request.wfile.write(piece)
            except OSError:
                return
            self.sent[file] = self.sent.get(file, 0) + len(piece)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
