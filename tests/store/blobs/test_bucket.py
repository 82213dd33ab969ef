"""What can be wrong with a bucket: it is said at the start, with what to set; later it only delays, and looks like no
blob that is gone."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from store.blobs.bucket import Bucket
from store.blobs.contract import StoreAway, is_lasting
from store.blobs.objects import ObjectBlobs
from store.blobs.opening import check_blobs
from store.blobs.room import what_failed
from store.settings import Settings, SettingsError
from tests.servers import OwnStore, free_port


@pytest.fixture
def environment(object_store: OwnStore, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def answering(environment: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A store that answers everything with the last of these codes, and repeats what it should not."""
    codes = ["AccessDenied"]

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            sent = self.headers.get("authorization")
            body = f"<Error><Code>{codes[-1]}</Code><Message>{sent} test-secret-of-weft</Message></Error>".encode()
            self.send_response(403 if codes[-1] != "NoSuchBucket" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield codes
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "variables", "said"),
    [
        ("s3://no-such-bucket/x", {}, "blob_url: there is no such bucket"),
        (OwnStore.url, {"AWS_ACCESS_KEY_ID": "another-key"}, "AWS_ACCESS_KEY_ID"),
        (OwnStore.url, {"AWS_SECRET_ACCESS_KEY": "another-secret"}, "AWS_SECRET_ACCESS_KEY: it does not belong"),
        (OwnStore.url, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "AWS_ACCESS_KEY_ID and AWS_SECRET"),
        (OwnStore.url, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "AWS_ENDPOINT_URL: nothing answers"),
        (OwnStore.url, {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "AWS_ENDPOINT_URL: nothing answers"),
    ],
)
def test_a_start_says_what_to_set(
    environment: pytest.MonkeyPatch, tmp_path: Path, url: str, variables: dict[str, str], said: str
) -> None:
    check_blobs(Settings(data_dir=tmp_path, blob_url=OwnStore.url))
    for name, value in variables.items():
        if value:
            environment.setenv(name, value)
        else:
            environment.delenv(name)
    with pytest.raises(SettingsError) as refused:
        check_blobs(Settings(data_dir=tmp_path, blob_url=url))
    assert said in str(refused.value)
    assert url in str(refused.value)
    assert "secret-of-weft" not in str(refused.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("AuthorizationHeaderMalformed", "AWS_REGION"),
        ("RequestTimeTooSkewed", "the clock of this machine"),
        ("AccessDenied", "may not list, read, write"),
        ("ExpiredToken", "AWS_SESSION_TOKEN"),
        ("SomethingElse", "SomethingElse"),
    ],
)
def test_what_a_store_says_is_explained_and_never_repeated(
    answering: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    answering.append(code)
    with pytest.raises(SettingsError, match=said) as refused:
        check_blobs(Settings(data_dir=tmp_path, blob_url=OwnStore.url))
    with caplog.at_level(logging.WARNING), pytest.raises(StoreAway, match=code) as away:
        Bucket(OwnStore.url).get("x")
    assert what_failed(away.value) == f"the server's object store does not answer ({code})"
    assert said in caplog.text
    for text in (str(refused.value), str(away.value), caplog.text):
        assert "secret-of-weft" not in text
        assert "test-key" not in text


def test_a_bucket_that_is_gone_is_no_blob_that_is_gone(answering: list[str], tmp_path: Path) -> None:
    answering.append("NoSuchBucket")
    blobs = ObjectBlobs(Bucket(OwnStore.url), tmp_path, 1 << 20)
    for call in (blobs.get, blobs.exists, blobs.size_bytes, blobs.check_folder):
        with pytest.raises(StoreAway) as away:
            call("ops/aa/1")
        assert not is_lasting(away.value)


def test_a_store_that_is_away_delays(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = OwnStore(tmp_path / "objects")
    environment.setenv("AWS_ENDPOINT_URL", own.environment["AWS_ENDPOINT_URL"])
    bucket = Bucket(f"{own.url}/{uuid.uuid4().hex}")
    bucket.check()
    blobs = ObjectBlobs(bucket, tmp_path / "cache", 1 << 20)
    blobs.put("a", b"before")
    own.stop()
    with pytest.raises(StoreAway, match="Unreachable"):
        blobs.get("a")
    thread = threading.Timer(0.1, own.start)
    thread.start()
    while True:
        try:
            blobs.put("b", b"during")
            break
        except StoreAway:  # as whoever needs it does
            continue
    assert (blobs.get("a"), blobs.get("b")) == (b"before", b"during")
    thread.join()
    own.stop()


@pytest.mark.parametrize(
    "url", ["https://bucket/x", "s3://", "s3://A", "s3://bucket/a//b", "s3://bucket/a b", "bucket"]
)
def test_what_names_no_bucket_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="blob_url"):
        Settings(data_dir=tmp_path, blob_url=url)


def test_short_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="server_secret"):
        Settings(data_dir=tmp_path, server_secret="short", port=free_port())
