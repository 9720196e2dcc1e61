"""A Hugging Face hub of a few tiny repositories, on a real socket: the paths and headers of the real one."""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT: Final = "c" * 40
# As on the hub: what is large or binary is LFS.
_LFS: Final = (".safetensors", ".gguf", ".bin")


@dataclass(slots=True)
class Repo:
    """`lies` are sizes that the hub claims for files, whatever they are. Lists have the tag of MLX's models."""

    files: dict[str, bytes]
    token: str = ""
    is_gated: bool = False
    lies: dict[str, int] = field(default_factory=dict[str, int])
    downloads: int = 0

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        size = self.lies.get(name, len(content))
        made: dict[str, Any] = {"size": size, "oid": hashlib.sha1(content).hexdigest()}
        if name.endswith(_LFS):
            made["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return made


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the hub received."""

    method: str
    path: str
    range: str
    authorization: str


class Hub:
    """`with Hub({"org/m": Repo(...)}) as hub`. `cuts` says after how many bytes a file's next answers break off."""

    def __init__(self, repos: Mapping[str, Repo]) -> None:
        self.repos = dict(repos)
        self.requests: list[Request] = []
        self.cuts: dict[str, list[int]] = {}
        # After how many bytes whole answers of a file stop, without an end.
        self.stalls: dict[str, int] = {}
        self._ends = threading.Event()
        self.ignores_ranges = False
        # Sends whoever wants a large file to another host, as the real one does.
        self.has_cdn = False
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for_the_end(self) -> None:
        self._ends.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environ(self, cache: Path, **more: str) -> dict[str, str]:
        """Environment by which a process uses this hub and its own cache, and connects to no other host."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache.parent / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1",
        } | more  # fmt: skip

    def asked_for(self, name: str, method: str = "GET") -> list[Request]:
        return [one for one in self.requests if one.method == method and one.path.endswith(f"/{name}")]


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is for tests."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("authorization", "")
        self.owner.requests.append(Request(self.command, path, self.headers.get("range", ""), authorization))
        if path == "/api/models":
            self._list(parse_qs(urlsplit(self.path).query))
            return
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        if cdn := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._file(self.owner.repos[cdn[1]], cdn[2])
            return
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        repo = self.owner.repos.get(found[1]) if found else None
        if repo is None or (repo.token and authorization != f"Bearer {repo.token}"):
            self._send(404 if authorization else 401, b"{}", {"x-error-code": "RepoNotFound"})
        elif (revision := found[2 if file else 3]) not in (None, "main", COMMIT):  # type: ignore[index]
            self._send(404, b"{}", {"x-error-code": "RevisionNotFound", "x-error-message": f"no {revision}"})
        elif file is not None and self.owner.has_cdn and file[3].endswith(_LFS):
            etag = repo.entry(file[3])["lfs"]["oid"]
            place = f"{self.owner.url.replace('127.0.0.1', 'localhost')}/cdn/{file[1]}/{file[3]}"
            self._send(302, b"", {"location": place, "x-repo-commit": COMMIT, "x-linked-etag": f'"{etag}"'})
        elif file is not None:
            self._file(repo, file[3])
        elif api is not None and api[2] == "tree":
            tree = [{"type": "file", "path": name, **repo.entry(name)} for name in repo.files]
            self._send(200, json.dumps(tree).encode())
        else:
            self._model(repo, found[1])  # type: ignore[index]

    def _list(self, asked: dict[str, list[str]]) -> None:
        """By downloads, as `sort=downloads` wants them; of config.json the parts that the real one shows."""
        word, author = asked.get("search", [""])[0].lower(), asked.get("author", [""])[0]
        assert asked["filter"] == ["mlx"]
        assert asked["sort"] == ["downloads"]
        listed: list[dict[str, Any]] = []
        for name, repo in sorted(self.owner.repos.items(), key=lambda item: -item[1].downloads):
            if word in name.lower() and name.startswith(f"{author}/" if author else ""):
                config = json.loads(repo.files.get("config.json", b"{}"))
                shown = {key: config[key] for key in ("model_type", "architectures") if key in config}
                listed.append({"_id": "0", "id": name, "downloads": repo.downloads, "config": shown})
        self._send(200, json.dumps(listed[: int(asked["limit"][0])]).encode())

    def _model(self, repo: Repo, name: str) -> None:
        siblings: list[dict[str, Any]] = []
        for file in repo.files:
            entry = repo.entry(file)
            one = {"rfilename": file, "size": entry["size"], "blobId": entry["oid"]}
            if lfs := entry.get("lfs"):
                one["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 134}
            siblings.append(one)
        body = {"id": name, "modelId": name, "sha": COMMIT, "gated": repo.is_gated, "siblings": siblings}
        self._send(200, json.dumps(body).encode())

    def _file(self, repo: Repo, name: str) -> None:
        if repo.is_gated:
            self._send(403, b"{}", {"x-error-code": "GatedRepo"})
            return
        if name not in repo.files:
            self._send(404, b"{}", {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT})
            return
        content, entry = repo.files[name], repo.entry(name)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"x-repo-commit": COMMIT, "etag": f'"{etag}"', "accept-ranges": "bytes"}
        status = 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if wanted and not self.owner.ignores_ranges:
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["content-range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
            content, status = content[first : last + 1], 206
        if self.command == "GET" and status == 200 and (stall := self.owner.stalls.get(name)):
            self._stall(content, headers, stall)
            return
        cuts = self.owner.cuts.get(name)
        self._send(status, content, headers, cuts.pop(0) if cuts and self.command == "GET" else None)

    def _stall(self, content: bytes, headers: Mapping[str, str], count: int) -> None:
        self.send_response(200)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[:count])
        self.owner.wait_for_the_end()
        self.close_connection = True

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def model_repo(folder: Path, **settings: Any) -> Repo:
    """A folder as a repository, with a page beside it that no loader reads."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return Repo(files | {"README.md": b"# a model"}, **settings)
