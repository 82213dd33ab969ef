"""An OpenID provider for tests: `oidc-provider-mock` in a process of its own, and in front of it `Liar`, over HTTP too,
which makes clients keep to PKCE and can change ID tokens and sign them with any key. Requests have `verify=False`:
reading the machine's certificates would take longer than all the rest, and HTTP needs none."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

from tests.servers import free_port

Claims = dict[str, Any]
#: How long a process may take to answer.
PATIENCE_S = 60.0


@contextmanager
def provider_process() -> Iterator[str]:
    """The address of a running provider."""
    port = free_port()
    with _process("-m", "oidc_provider_mock", "--port", str(port)):
        wait_for(f"http://localhost:{port}/.well-known/openid-configuration")
        yield f"http://localhost:{port}"


@contextmanager
def toolkit_process(secret: str, redirect_uri: str, people: dict[str, Claims]) -> Iterator[str]:
    """The address of a running provider of another implementation (`toolkit_provider`); its issuer is at /o."""
    port, program = free_port(), Path(__file__).with_name("toolkit_provider.py")
    with _process(str(program), str(port), secret, redirect_uri, json.dumps(people)):
        wait_for(f"http://localhost:{port}/o/.well-known/openid-configuration")
        yield f"http://localhost:{port}"


@contextmanager
def _process(*arguments: str) -> Iterator[None]:
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, verify=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(url)


def good_key(name: str) -> ECKey:
    return ECKey.generate_key("P-256", {"kid": name, "use": "sig", "alg": "ES256"})


@dataclass
class Liar:
    """The provider at `behind`, as clients see it at `url`. `changed` are claims that replace those of its ID tokens
    (None: removed); `sign` makes a token of claims; `keys` are published after the `unreadable` ones; `told` changes
    what the userinfo endpoint says; `ahead_s` is how far the clock that dates its answers is ahead."""

    behind: str
    url: str = ""
    own: ECKey = field(default_factory=lambda: good_key("first"))
    key: ECKey = field(init=False)
    changed: Claims = field(default_factory=dict)
    told: Claims = field(default_factory=dict)
    discovered: Claims = field(default_factory=dict)
    answered: dict[str, str] = field(default_factory=dict)
    sign: Callable[[Claims], str] | None = None
    keys: list[ECKey] | None = None
    unreadable: list[Claims] = field(default_factory=list)
    ahead_s: float = 0.0
    challenge: str = ""
    asked: list[str] = field(default_factory=list)
    last: Claims = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.honest()

    def honest(self) -> None:
        """Behave as the provider does, except for the key."""
        self.key = self.own
        self.changed, self.told, self.discovered, self.answered = {}, {}, {}, {}
        self.sign, self.keys, self.ahead_s = None, None, 0.0
        self.unreadable = []

    def signed(self, claims: Claims) -> str:
        return jwt.encode({"alg": "ES256", "kid": self.key.kid}, claims, self.key)

    def published(self) -> Claims:
        readable = KeySet(self.keys if self.keys is not None else [self.key]).as_dict(private=False)
        return {"keys": [*self.unreadable, *readable["keys"]]}

    def token(self, given: Claims) -> Claims:
        """The provider's answer with another ID token in it."""
        body = given["id_token"].split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        claims = {name: value for name, value in {**claims, **self.changed}.items() if value is not None}
        claims.pop("at_hash", None)
        token = (self.sign or self.signed)(claims)
        self.last = {**given, "id_token": token}
        return self.last


@contextmanager
def liar_at(behind: str) -> Iterator[Liar]:
    liar = Liar(behind)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward(b"")

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers.get("content-length", 0))))

        do_PUT = do_POST

        def forward(self, body: bytes) -> None:
            path = urlsplit(self.path).path
            liar.asked.append(f"{self.command} {path}")
            if path == "/oauth2/authorize":
                liar.challenge = parse_qs(urlsplit(self.path).query).get("code_challenge", [""])[0]
            if path == "/oauth2/token" and not proves(parse_qs(body.decode()), liar.challenge):
                self.answer(400, {"error": "invalid_grant"})
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            reply = httpx.request(self.command, liar.behind + self.path, content=body, headers=headers, verify=False)
            if path == "/jwks":
                self.answer(200, liar.published())
            elif path == "/oauth2/token" and reply.status_code == 200:
                self.answer(200, liar.token(reply.json()))
            elif path == "/userinfo" and reply.status_code == 200:
                self.answer(200, {**reply.json(), **liar.told})
            elif path == "/.well-known/openid-configuration":
                self.answer(200, {**reply.json(), **liar.discovered})
            else:
                self.answer(reply.status_code, reply.content, dict(reply.headers))

        def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers or {"content-type": "application/json"}).items():
                if name.lower() not in (
                    "content-length",
                    "transfer-encoding",
                    "content-encoding",
                    "connection",
                    "date",
                ):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(int(time.time() + liar.ahead_s))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), Handler) as server:
        liar.url = f"http://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield liar
        server.shutdown()
        thread.join(10)


def proves(form: dict[str, list[str]], challenge: str) -> bool:
    """Whether a verifier belongs to a challenge (RFC 7636, section 4.6)."""
    verifier = form.get("code_verifier", [""])[0]
    digest = hashlib.sha256(verifier.encode()).digest()
    return bool(verifier) and base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == challenge
