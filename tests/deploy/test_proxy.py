"""nginx as docs/production.md has it, in front of a server that answers with the headers it got."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import orjson
import pytest

from store.settings import Limits
from tests.pages import blocks
from tests.servers import free_port

CONFIG = """daemon off; master_process off; pid nginx.pid; error_log stderr; events {{}}
http {{
  access_log off; client_body_temp_path body; proxy_temp_path proxy;
  fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server {{
    listen 127.0.0.1:{port};
    {locations}
  }}
}}
"""


def locations() -> str:
    [found] = [block.text for block in blocks("docs/production.md") if block.first.startswith("location /")]
    return found


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(orjson.dumps({name.lower(): value for name, value in self.headers.items()}))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(tmp_path: Path, upstream: ThreadingHTTPServer) -> Iterator[str]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    port = free_port()
    text = locations().replace("127.0.0.1:8001", f"127.0.0.1:{upstream.server_port}")
    (tmp_path / "nginx.conf").write_text(CONFIG.format(port=port, locations=text))
    process = subprocess.Popen([program, "-p", str(tmp_path), "-c", "nginx.conf", "-e", "stderr"])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(500):
            try:
                httpx.get(url)
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_the_server_is_told_of_its_client(proxy: str) -> None:
    """The host with its port; and an address that the client made up stands before its own."""
    made_up = {"Host": "weft.example:8443", "X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"}
    got = httpx.get(proxy, headers=made_up).json()
    assert got["host"] == "weft.example:8443"
    assert got["x-forwarded-for"] == "192.0.2.1, 127.0.0.1"
    assert got["x-forwarded-proto"] == "http"


def test_while_the_server_is_away_connections_are_closed(proxy: str, upstream: ThreadingHTTPServer) -> None:
    upstream.server_close()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(proxy)


def test_it_takes_what_the_server_takes() -> None:
    [size_mib] = re.findall(r"client_max_body_size (\d+)m;", locations())
    assert int(size_mib) << 20 == Limits().max_body_bytes
