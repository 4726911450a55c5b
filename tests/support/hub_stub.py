"""A small Hugging Face hub: a real HTTP server that answers as the real hub does.

It serves ``/api/models/ID[/revision/REV]`` and ``/ID/resolve/REV/FILE`` with commits, ETags and
ranges, and refuses with the real one's ``X-Error-Code`` headers.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_thetokenofthetests"
SIGNATURE = "thesignatureofthetests"


@dataclass(slots=True)
class StubModel:
    """A model of the stub: its commits by hash, and the commits that branches and tags name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    """Its terms are not accepted."""

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit with these files, which ``ref`` names from now on; returns its hash."""
        content = repr((sorted(files.items()), len(self.commits))).encode()
        commit = hashlib.sha1(content).hexdigest()
        self.commits[commit] = files
        self.refs[ref] = commit
        return commit


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request that the stub got."""

    method: str
    path: str
    range: str = ""
    token: str = ""


class HubStub:
    """A hub on a free port of loopback. ``cut`` and ``stalled`` make single downloads fail."""

    def __init__(self) -> None:
        self.models: dict[str, StubModel] = {}
        self.seen: list[SeenRequest] = []
        self.cut: dict[str, int] = {}
        """Files whose next download ends after this number of bytes, the connection closed."""
        self.stalled: dict[str, int] = {}
        """Files whose downloads all stop after this number of bytes, the connection open."""
        self.slow: dict[str, float] = {}
        """Files that are sent in pieces of 4 KiB, with this number of seconds between two."""
        self.refused: dict[str, int] = {}
        """Files whose downloads are all answered with this status."""
        self.signed: set[str] = set()
        """Files that lie at an address with a signature, which nothing is found at."""
        self.answer_nothing = False
        """Whether every request is left without an answer."""
        self.released = threading.Event()
        """Ends all that stands still."""
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.stub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, model_id: str, folder: Path) -> StubModel:
        """A model whose main branch has the folder's files."""
        model = self.models[model_id] = StubModel()
        model.commit(files_of(folder))
        return model

    def downloads(self, ending: str = "") -> list[SeenRequest]:
        """The downloads of files whose names end so."""
        return [
            one
            for one in self.seen
            if one.method == "GET" and "/resolve/" in one.path and one.path.endswith(ending)
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """From now on nothing listens there. A second call does nothing."""
        self.released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a folder's files."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str, commit: str = "") -> None:
        super().__init__(message)
        self.status = status
        named = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self.headers = {name: value for name, value in named.items() if value}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def stub(self) -> HubStub:
        stub: HubStub = self.server.stub  # type: ignore[attr-defined]
        return stub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path = unquote(urlsplit(self.path).path)
        self.stub.seen.append(SeenRequest(self.command, path, self.headers.get("Range", ""), token))
        if self.stub.answer_nothing:
            self.stub.released.wait(30)
            self.close_connection = True
            return
        try:
            self._serve(path, token)
        except _Refused as refusal:
            self._head(refusal.status, 0, refusal.headers)

    def _serve(self, path: str, token: str) -> None:
        if token not in ("", TOKEN):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        found = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?|/([^/]+/[^/]+)/resolve/([^/]+)/(.+)",
            path,
        )
        if found is None:
            raise _Refused(404, "", "Sorry, we can't find the page you are looking for.")
        model_id, revision = found[1] or found[3], found[2] or found[4] or "main"
        model = self.stub.models.get(model_id)
        if model is None or (model.private and not token):
            raise _Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        commit = model.refs.get(revision, revision)
        if commit not in model.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, name = model.commits[commit], found[5]
        if name is None:
            self._describe(model_id, commit, files)
        elif model.gated:
            raise _Refused(403 if token else 401, "GatedRepo", "Access is restricted")
        elif name not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found", commit)
        elif self.command == "GET" and name in self.stub.refused:
            raise _Refused(self.stub.refused[name], "", "Refused")
        else:
            self._send(name, files[name], commit)

    def _describe(self, model_id: str, commit: str, files: dict[str, bytes]) -> None:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        about: dict[str, Any] = {"id": model_id, "sha": commit, "siblings": siblings}
        body = json.dumps(about).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(body)

    def _send(self, name: str, data: bytes, commit: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if name in self.stub.signed:
            address = f"{self.stub.endpoint}/lost?X-Amz-Signature={SIGNATURE}"
            self._head(302, 0, headers | {"Location": address, "X-Linked-Size": str(len(data))})
            return
        start = 0
        if (asked := self.headers.get("Range")) is not None:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if asked else 200, len(data) - start, headers)
        if self.command == "HEAD":
            return
        if name in self.stub.cut:
            self.wfile.write(data[start : self.stub.cut.pop(name)])
            self.close_connection = True
        elif name in self.stub.stalled:
            self.wfile.write(data[start : self.stub.stalled[name]])
            self.wfile.flush()
            self.stub.released.wait(30)
            self.close_connection = True
        elif name in self.stub.slow:
            for begin in range(start, len(data), 4096):
                self.wfile.write(data[begin : begin + 4096])
                self.wfile.flush()
                self.stub.released.wait(self.stub.slow[name])
        else:
            self.wfile.write(data[start:])

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
