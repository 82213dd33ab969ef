from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from api.who.signing import LinkRefused, Signer
from store.people.secret import FILE_NAME, derive, server_secret

PATH = "/api/v1/downloads/s:train:0/weights/a b"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
signer = Signer(b"x" * 32)


def query(path: str = PATH, expires: datetime = NOW + timedelta(hours=1)) -> dict[str, str]:
    return dict(parse_qsl(signer.sign(path, expires, 7)))


def test_a_link_holds_until_it_expires() -> None:
    assert signer.verify(PATH, query(), NOW) == 7
    signer.verify(PATH, query(), NOW + timedelta(seconds=3599))
    for later in (timedelta(hours=1), timedelta(days=1)):
        with pytest.raises(LinkRefused, match="expired") as refused:
            signer.verify(PATH, query(), NOW + later)
        assert refused.value.status == 403  # no client asks again


@pytest.mark.parametrize(
    "changes",
    [
        {"expires": "9999999999"},
        {"expires": ""},
        {"expires": "x"},
        {"key": "8"},
        {"key": ""},
        {"signature": ""},
        {"signature": "é" * 64},
    ],
)
def test_a_changed_link_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(LinkRefused, match="not one that the server has signed"):
        signer.verify(PATH, query() | changes, NOW)


def test_a_link_is_for_one_path_of_one_server() -> None:
    for path, by in ((PATH + "c", signer), (PATH, Signer(b"y" * 32))):
        with pytest.raises(LinkRefused):
            by.verify(path, query(), NOW)
    with pytest.raises(LinkRefused):
        signer.verify(PATH, {}, NOW)


def test_the_secret_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    secret = server_secret(tmp_path)
    assert server_secret(tmp_path) == secret
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert derive(secret, "a") != derive(secret, "b")
    (tmp_path / FILE_NAME).write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        server_secret(tmp_path)
