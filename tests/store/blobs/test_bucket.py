"""What can be wrong with a bucket: a start refuses it and says what to set; later it only delays, and is never taken
for a missing blob."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from obstore.exceptions import BaseError

from store.blobs.bucket import Bucket, _reason
from store.blobs.contract import StoreAway, is_lasting
from store.blobs.objects import ObjectBlobs
from store.blobs.opening import check_blobs
from store.blobs.room import what_failed
from store.settings import Settings, SettingsError, Unreachable
from tests.servers import OwnStore, free_port


@pytest.fixture
def environment(object_store: OwnStore, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def answering(environment: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A store that answers everything with the last of these codes, and repeats secrets in its answers. With "" a proxy
    before it answers."""
    codes = ["AccessDenied"]

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            sent = self.headers.get("authorization")
            message = f"<Message>{sent} test-secret-of-weft</Message>"
            body = f"<Error><Code>{codes[-1]}</Code>{message}</Error>".encode() if codes[-1] else message.encode()
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
    ("url", "variables", "at"),
    [
        ("s3://bucket/a/b", {}, "https://bucket.s3.us-east-1.amazonaws.com/a/b/x"),
        ("s3://bucket", {"AWS_DEFAULT_REGION": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com/x"),
        (
            "s3://a.bucket/",
            {"AWS_REGION": "eu-west-1"},
            "https://s3.eu-west-1.amazonaws.com/a.bucket/x",
        ),  # no wildcard certificate covers a dotted name
        ("s3://bucket/a", {"AWS_ENDPOINT_URL": "http://own:9000"}, "http://own:9000/bucket/a/x"),
        (
            "s3://bucket/a",
            {"AWS_ENDPOINT_URL": "http://all:1", "AWS_ENDPOINT_URL_S3": "https://s3:2"},
            "https://s3:2/bucket/a/x",
        ),
    ],
)
def test_the_address_at_which_a_bucket_is_asked(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], at: str
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", **variables}.items():
        monkeypatch.setenv(name, value)
    region = next((value for name, value in variables.items() if "REGION" in name), "us-east-1")
    where, _, asked = Bucket(url).link("x", timedelta(seconds=90)).partition("?")
    assert where == at
    assert "X-Amz-Expires=90" in asked
    assert f"%2F{region}%2Fs3" in asked


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
    assert isinstance(refused.value, Unreachable) == ("nothing answers" in said)
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
        ("", "HTTP403"),
    ],
)
def test_what_a_store_says_is_explained_and_never_repeated(
    answering: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    answering.append(code)
    with pytest.raises(SettingsError, match=said) as refused:
        check_blobs(Settings(data_dir=tmp_path, blob_url=OwnStore.url))
    with caplog.at_level(logging.WARNING), pytest.raises(StoreAway, match=code or "HTTP403") as away:
        Bucket(OwnStore.url).get("x")
    assert what_failed(away.value) == f"the server's object store does not answer ({code or 'HTTP403'})"
    assert (said if code else "HTTP 403") in caplog.text
    for text in (str(refused.value), str(away.value), caplog.text):
        assert "secret-of-weft" not in text
        assert "test-key" not in text


@pytest.mark.parametrize("place", ["169.254.169.254/latest/api/token", "169.254.170.2/v2/credentials/x"])
def test_a_machine_or_a_container_without_a_role_has_no_credentials(place: str) -> None:
    said = f"Error performing GET http://{place} in 2 ms - Server returned non-2xx status code: 404 Not Found: none"
    assert _reason(BaseError(said))[0] == "NoCredentials"


def test_a_missing_bucket_is_not_taken_for_a_missing_blob(answering: list[str], tmp_path: Path) -> None:
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
        except StoreAway:  # every caller of a store tries again
            continue
    assert (blobs.get("a"), blobs.get("b")) == (b"before", b"during")
    thread.join()
    own.stop()


@pytest.mark.parametrize(
    "url", ["https://bucket/x", "s3://", "s3://A", "s3://bucket/a//b", "s3://bucket/a b", "bucket"]
)
def test_a_url_that_names_no_bucket_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="blob_url"):
        Settings(data_dir=tmp_path, blob_url=url)


def test_short_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="server_secret"):
        Settings(data_dir=tmp_path, server_secret="short", port=free_port())


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No AWS variable is set but an endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("AWS_ENDPOINT_URL", "http://exa mple", "has a space"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", "must be http://HOST"),
        ("AWS_ENDPOINT_URL_S3", "http://[::1", "must be http://HOST"),
        ("AWS_METADATA_ENDPOINT", "http://a b", "has a space"),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "a b", "has a space"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "nowhere", "must be http://HOST"),
        ("AWS_REGION", "eu\nwest", "an end of line"),
        ("AWS_ACCESS_KEY_ID", "a\nb", "an end of line"),
        ("AWS_SESSION_TOKEN", "\u00e9", "a sign beyond ASCII"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/nowhere", "cannot be read"),
    ],
)
def test_a_variable_whose_value_no_request_can_carry_is_named(
    bare: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    """The store's client would panic in Rust: that is no Exception, and prints a page about its own source."""
    bare.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^{name}: .*{why}"):
        Bucket("s3://weft")


def test_a_token_that_no_request_can_carry_is_named_at_the_start_and_delays_later(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    bare.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/role")
    bare.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    token.write_text("token")
    bucket = Bucket("s3://weft")
    token.write_text("token\n")  # as a shell's echo writes it
    with pytest.raises(SettingsError, match=f"TOKEN_FILE: {token} must be ASCII without an end of line"):
        Bucket("s3://weft")
    with pytest.raises(SettingsError, match=r"AWS_\.\.\.: one of these variables, or a file that one names"):
        bucket.check()
    for ask in (bucket.get, bucket.size_bytes):
        with pytest.raises(StoreAway) as away:
            ask("a")
        assert not is_lasting(away.value)
