"""How strangers and proxies reach a real server: webhooks from anybody, Host headers that contain paths, and a proxy
that does not run on this machine."""

from __future__ import annotations

import http.client
import json
import socket
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import zstandard
from starlette.datastructures import URL
from starlette.requests import Request

from tests.api.conftest import World, card, settings, world
from tests.e2e.conftest import Weftd
from tests.e2e.raw import RawClient
from tests.fakestripe.app import Front
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.fakestripe.webhooks import signed

__all__ = ["card", "settings", "world"]

pytestmark = pytest.mark.server

PROXY, STRANGER, CLIENT = "127.0.0.2", "127.0.0.3", "127.0.0.9"
SAME_SITE = {"sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    folder = tmp_path_factory.mktemp("front")
    config = folder / "weft.toml"
    config.write_text(
        f'[front]\ntrusted_proxies = ["{PROXY}"]\n[payments]\nenabled = true\nsecret_key = "{Front.key}"\n'
        f'webhook_secrets = ["{WEBHOOK_SECRET}"]\napi_base = "http://127.0.0.1:9"\n'
    )
    server = Weftd(folder / "data", "--config", str(config)).start()
    yield server
    assert server.stop() == 0, server.log()


class TestWebhooks:
    def send(self, server: Weftd, body: bytes, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{server.url}/api/v1/stripe/webhook", content=body, headers=headers, timeout=60)

    def test_a_signed_webhook_is_taken(self, server: Weftd) -> None:
        body, signature = signed({"id": "evt_1", "object": "event", "type": "x", "data": {}}, WEBHOOK_SECRET)
        reply = self.send(server, body, {"stripe-signature": signature})
        assert reply.status_code == 200, reply.text

    def test_a_large_webhook_is_not_read(self, server: Weftd) -> None:
        body, signature = signed({"id": "evt_2", "padding": "x" * (256 * 1024)}, WEBHOOK_SECRET)
        reply = self.send(server, body, {"stripe-signature": signature})
        assert (reply.status_code, "262144 bytes" in reply.text) == (413, True)

    def test_a_packed_webhook_is_not_unpacked(self, server: Weftd) -> None:
        body, signature = signed({"id": "evt_3"}, WEBHOOK_SECRET)
        headers = {"stripe-signature": signature, "content-encoding": "zstd"}
        assert self.send(server, zstandard.compress(body), headers).status_code == 415


class TestHosts:
    """The Host header never decides what a route may show."""

    HOSTS = ("x/../../", "x/api/v1/healthz?", "x#", "@y", "x\\..", "a b")

    @pytest.mark.parametrize("host", HOSTS)
    def test_a_path_for_a_host(self, server: Weftd, host: str) -> None:
        raw = RawClient(server, "acme")
        address, port = raw.address.split(":")
        for path in (f"/api/v1/sessions/{raw.session_id}/trace.pftrace", "/api/v1/downloads/x/checkpoint.tar"):
            connection = http.client.HTTPConnection(address, int(port), timeout=30)
            connection.request("GET", f"{path}?expires=9999999999&signature=x", headers={"Host": host})
            assert connection.getresponse().status in (400, 403)

    @pytest.mark.parametrize("host", HOSTS)
    def test_frameworks_that_put_the_host_into_paths(
        self, world: World, host: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As older Starlettes do: a link for one session opens no other, and none is refused."""

        def url(request: Request) -> URL:
            headers = dict(request.scope["headers"])
            return URL(f"http://{headers.get(b'host', b'').decode('latin1')}{request.scope['path']}")

        mine, other = world.session(), world.session(world.other_key)
        link = world.get(f"sessions/{mine}/trace_export")["url"]
        path, _, query = link.removeprefix("http://testserver").partition("?")
        monkeypatch.setattr(Request, "url", property(url))
        assert world.http.get(f"{path}?{query}", headers={"host": host}).status_code == 200
        poisoned = f"x{path}?"
        reply = world.http.get(f"/api/v1/sessions/{other}/trace.pftrace?{query}", headers={"host": poisoned})
        assert reply.status_code == 403


class Forwarding(BaseHTTPRequestHandler):
    """A proxy at PROXY: forwards requests, and says for whom."""

    to = ""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        host, port = self.to.removeprefix("http://").split(":")
        there = http.client.HTTPConnection(host, int(port), timeout=60, source_address=(PROXY, 0))
        headers = dict(self.headers)
        said = [headers.get("X-Forwarded-For") or headers.get("x-forwarded-for"), self.client_address[0]]
        headers = {name: value for name, value in headers.items() if not name.lower().startswith("x-forwarded")}
        headers |= {"X-Forwarded-For": ", ".join(filter(None, said)), "X-Forwarded-Proto": "https"}
        there.request(self.command, self.path, body, headers)
        reply = there.getresponse()
        content = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _pass_on

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def proxy(server: Weftd) -> Iterator[str]:
    handler = type("Handler", (Forwarding,), {"to": server.url})
    with ThreadingHTTPServer((PROXY, 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://{PROXY}:{found.server_address[1]}"
        found.shutdown()
        thread.join()


class TestProxy:
    def client(self, url: str, source: str = CLIENT, **headers: str) -> httpx.Client:
        transport = httpx.HTTPTransport(local_address=source)
        return httpx.Client(transport=transport, base_url=url, headers={**SAME_SITE, **headers}, timeout=60)

    def session(self, http: httpx.Client, key: str) -> str:
        reply = http.post("/api/v1/create_session", json={"sdk_version": "x"}, headers={"x-api-key": key})
        return str(reply.json()["session_id"])

    def address_of(self, server: Weftd, session_id: str) -> str:
        """The address in the audit log from which a session was made."""
        with sqlite3.connect(server.data_dir / "weft.db") as database:
            rows = database.execute("SELECT ip FROM audit_log WHERE target = ?", (session_id,)).fetchall()
        (found,) = rows
        return str(found[0])

    def test_cookies_are_secure_and_links_https(self, server: Weftd, proxy: str) -> None:
        with self.client(proxy, host="weft.example") as http:
            signed_in = http.post("/console/login", data={"key": server.key()})
            cookie = signed_in.headers["set-cookie"]
            assert cookie.startswith("__Host-weft_console=")
            assert "; Secure" in cookie
            session = self.session(http, server.key())
            exported = http.get(f"/api/v1/sessions/{session}/trace_export", headers={"x-api-key": server.key()})
            assert exported.json()["url"].startswith("https://weft.example/api/v1/sessions/")

    def test_the_audit_log_has_the_client_and_not_the_proxy(self, server: Weftd, proxy: str) -> None:
        with self.client(proxy) as http:
            assert self.address_of(server, self.session(http, server.key())) == CLIENT
        with self.client(proxy, **{"x-forwarded-for": "198.51.100.7"}) as http:  # the address that the client claims
            assert self.address_of(server, self.session(http, server.key())) == CLIENT

    def test_headers_of_untrusted_senders_are_not_believed(self, server: Weftd) -> None:
        headers = {"x-forwarded-for": "198.51.100.7", "x-forwarded-proto": "https"}
        for source in (STRANGER, "127.0.0.1"):
            with self.client(server.url, source, **headers) as http:
                assert self.address_of(server, self.session(http, server.key())) == source
                cookie = http.post("/console/login", data={"key": server.key()}).headers["set-cookie"]
                assert cookie.startswith("weft_console=")


def test_integers_that_no_database_has(server: Weftd) -> None:
    raw = RawClient(server, "acme")
    for body in (
        {"target": {"sampling_session_id": "x", "cloned_sampler_id": 2**62}},
        {"target": {"sampling_session_id": "x"}, "prev_cursor": 2**62},
    ):
        reply = raw.http.post("/retrieve_futures", content=json.dumps(body))
        assert reply.status_code == 422, reply.text


def test_half_sent_headers_leave_room_for_others(server: Weftd) -> None:
    held = []
    address = httpx.URL(server.url)
    for _ in range(400):
        connection = socket.create_connection((address.host, address.port), timeout=10, source_address=(STRANGER, 0))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: ")
        held.append(connection)
    assert RawClient(server, "acme").new_run()
    for connection in held:
        connection.settimeout(30)
        assert connection.recv(10) == b""  # closed by the server
        connection.close()
