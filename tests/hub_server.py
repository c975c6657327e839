"""A local stand-in for the Hub: accepts pushes of huggingface_hub and serves them back."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import yaml

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class HubServer:
    """Use as a context manager; `url` is the endpoint, `files` the committed files, `requests` the requests.

    `repos` are the repositories that were created; they all have the same files, but those in `empty`.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.repos: set[str] = set()
        self.empty: set[str] = set()
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment that makes huggingface_hub in another process use this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_for_tests_only",
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }


def mistakes_in(card: str) -> list[dict[str, str]]:
    """Return what the Hub would refuse in a card's metadata: some of its rules."""
    data = yaml.safe_load(card.split("---")[1])
    listed = {key: data.get(key) or [] for key in ("base_model", "datasets")}
    listed = {key: [names] if isinstance(names, str) else names for key, names in listed.items()}
    invalid = [(key, name) for key, names in listed.items() for name in names if not _NAME.fullmatch(name)]
    found = [f'"{key}" with value "{name}" is not valid' for key, name in invalid]
    if not re.fullmatch(r"[a-z0-9.+-]+", data.get("license", "mit")):
        found.append(f'"license" must be one of apache-2.0, mit, ...: {data["license"]}')
    for result in (result for model in data.get("model-index", []) for result in model["results"]):
        needed = [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
        if not all(needed + [metric["type"] for metric in result["metrics"]]):
            found.append('"model-index" is not valid')
    return [{"message": message} for message in found]


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size + 2)[:size]
        self.rfile.readline()
        return data

    def _answer(self, value: object = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.hub.repos.add(name)
            self._answer({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {name: "lfs" if name.endswith((".safetensors", ".bin", ".png")) else "regular" for name in names}
            self._answer({"files": [{"path": name, "uploadMode": mode[name], "shouldIgnore": False} for name in names]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{item['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            for entry in map(json.loads, body.splitlines()):
                value = entry["value"]
                if entry["key"] == "file":
                    self.hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.hub.files[value["path"]] = self.hub.objects[value["oid"]]
            self._answer({"commitOid": "0" * 40, "commitUrl": f"{self.hub.url}/me/x/commit/{'0' * 40}"})
        elif path == "/api/validate-yaml":
            errors = mistakes_in(json.loads(body)["content"])
            self._answer({"errors": errors, "warnings": []}, status=400 if errors else 200)
        else:
            self._answer({"errors": [], "warnings": []})

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        self.hub.requests.append(f"PUT {urlsplit(self.path).path}")
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer({"error": "wrong hash"}, status=400)
        self.hub.objects[oid] = body
        return self._answer()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        repo = "/".join(path.removeprefix("/api/models/").removeprefix("/").split("/")[:2])
        if repo not in self.hub.repos | self.hub.empty:
            return self._answer({}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if "/resolve/" in path:
            name = path.split("/resolve/")[1].partition("/")[2]
            if name not in self.hub.files or repo in self.hub.empty:
                return self._answer({}, status=404, headers={"X-Error-Code": "EntryNotFound"})
            data = self.hub.files[name]
            headers = {"ETag": hashlib.sha256(data).hexdigest(), "X-Repo-Commit": "0" * 40}
            return self._answer(data, headers=headers)
        return self._answer({}, status=404)

    do_HEAD = do_GET
