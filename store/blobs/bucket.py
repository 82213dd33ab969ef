"""A bucket of an S3-compatible object store, and what can be wrong with it.

The client is obstore (the object_store of Apache Arrow, in Rust): it retries with backoff, uploads in parts, signs
what it sends with its SHA-256 so that the store refuses what arrives otherwise, and computes outside of Python's lock;
docs/production.md compares it with others. Endpoint, region and credentials come from the usual environment.

Any failure of the store is a StoreAway: clients and logs get its code, and nothing of what was sent. A missing bucket
must not look like missing blobs, which would end runs for good; so a blob counts as missing only if the mark, put there
at the first start, is seen beside it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from store.blobs.contract import StoreAway
from store.settings import SettingsError, Unreachable

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ImportError:
    raise SettingsError(
        "blob_url: the client of object stores is not installed: pip install 'weft-tuning-server[s3]'"
    ) from None

log = logging.getLogger(__name__)

#: Larger blobs are sent in parts of this size.
PART_BYTES = 16 << 20
#: Blobs are written to the disk in pieces of about this size.
READ_BYTES = 1 << 20
#: How many parts of one blob are sent at a time.
PARTS = 4
#: How long one attempt may take with all its data, and how long the store may be silent in it.
ATTEMPT, SILENCE = timedelta(seconds=300), timedelta(seconds=8)
#: How long a request is tried again. The caller waits, and decides what to do then.
RETRY = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=8),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
#: Seconds between two lines in the log about the same trouble.
SAY_AGAIN_S = 5.0
#: The object that marks the bucket as Weft's.
MARK = "weft"
#: The object that says whose blobs these are (`store.blobs.owner`).
OWNER = "owner"

#: Error codes of the store, and what to do about each.
_REMEDIES = {
    "NoSuchBucket": "blob_url: there is no such bucket; create it, or name another",
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID: the store does not know this key",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY: it does not belong to AWS_ACCESS_KEY_ID",
    "ExpiredToken": "AWS_SESSION_TOKEN: it has expired",
    "InvalidToken": "AWS_SESSION_TOKEN: the store does not know it",
    "AccessDenied": "AWS_ACCESS_KEY_ID: this key may not list, read, write and delete in this bucket",
    "AuthorizationHeaderMalformed": "AWS_REGION: the bucket is in another region",
    "PermanentRedirect": "AWS_REGION: the bucket is in another region",
    "IllegalLocationConstraintException": "AWS_REGION: the bucket is in another region",
    "RequestTimeTooSkewed": "the clock of this machine and the store's differ by more than 15 minutes: set it",
    "NoCredentials": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: set them, or run where the machine has a role",
    "Unreachable": "AWS_ENDPOINT_URL: nothing answers there",
    "Malformed": "AWS_...: one of these variables, or a file that one names, cannot be sent in a request",
}
#: Environment variables that hold addresses, and others that are sent. The client panics if one cannot be sent.
_ADDRESSES = (
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT"),
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_SENT = (
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME"),
)
#: The variable that names a file with a token; the token is sent if no keys are set.
_TOKEN_FILE = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"


@dataclass(frozen=True)
class Stored:
    key: str
    size_bytes: int
    written: float  # seconds since 1970


class Panicked(Exception):
    """The client panicked: settings in the environment cannot be sent."""


class Bucket:
    """The part of a bucket that begins with the prefix of `url` (s3://BUCKET/PREFIX); keys are below it."""

    def __init__(self, url: str) -> None:
        _check_environment()
        parts = urlsplit(url)
        self.url = url
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._said = -SAY_AGAIN_S
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        self._endpoint = endpoint or "Amazon S3"
        config: Any = {"endpoint": endpoint} if endpoint else {"virtual_hosted_style_request": "." not in parts.netloc}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region:
            config["region"] = region
        client: Any = {
            "timeout": ATTEMPT,
            "read_timeout": SILENCE,
            "connect_timeout": timedelta(seconds=3),
            "allow_http": endpoint.startswith("http://"),
        }
        retry: Any = RETRY
        try:
            self._store = S3Store(self._bucket, config=config, client_options=client, retry_config=retry)
        except (BaseError, ValueError) as error:
            raise SettingsError(f"blob_url {url}: {error}") from None

    def check(self) -> None:
        """Raise SettingsError, with what to set, unless blobs can be kept here."""
        if not self.is_used():
            with self._naming():
                obstore.put(self._store, self._at(MARK), b"blobs of Weft\n")

    def is_used(self) -> bool:
        """Whether a server has used this bucket. Raises SettingsError, with what to set, if nothing can be read."""
        with self._naming():
            try:
                obstore.get(self._store, self._at(MARK))  # GET, because unlike HEAD its error says what is wrong
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
            return True

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raise errors of the block as a SettingsError that names what to set."""
        try:
            with _without_panic():
                yield
        except (BaseError, OSError, Panicked) as error:
            code, _ = _reason(error)
            kind = SettingsError if code in _REMEDIES and code != "Unreachable" else Unreachable
            raise kind(f"blob_url {self.url} at {self._endpoint}: {_REMEDIES.get(code, code)} ({code})") from None

    def put(self, key: str, data: bytes | Path) -> None:
        with self._asked():
            obstore.put(self._store, self._at(key), data, chunk_size=PART_BYTES, max_concurrency=PARTS)

    def create(self, key: str, data: bytes) -> None:
        """Create an object; does nothing if there is one of this key."""
        with self._asked():
            try:
                obstore.get(self._store, self._at(key))
            except FileNotFoundError:
                with suppress(AlreadyExistsError):
                    obstore.put(self._store, self._at(key), data, mode="create")

    def get(self, key: str) -> bytes:
        """The bytes of an object. Raises FileNotFoundError if there is none."""
        with self._asked(key):
            return bytes(obstore.get(self._store, self._at(key)).bytes())

    def size_bytes(self, key: str) -> int:
        """The size of an object. Raises FileNotFoundError if there is none."""
        with self._asked(key):
            return int(obstore.head(self._store, self._at(key))["size"])

    def download(self, key: str, target: Path) -> None:
        """Write an object to `target`. Raises FileNotFoundError if there is none."""
        with target.open("wb") as file, self._asked(key):
            for piece in obstore.get(self._store, self._at(key)).stream(min_chunk_size=READ_BYTES):
                file.write(piece)

    def listed(self, folder: str) -> Iterator[Stored]:
        """The objects below a folder of keys."""
        cut = len(self._at("x")) - 1
        with self._asked():
            for batch in obstore.list(self._store, prefix=self._at(folder)):
                for found in batch:
                    yield Stored(found["path"][cut:], found["size"], found["last_modified"].timestamp())

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        with self._asked():
            for key in keys:
                obstore.delete(self._store, self._at(key))

    def link(self, key: str, lasts: timedelta) -> str:
        """A URL with which anybody can read the object for that long."""
        with self._asked():
            return str(obstore.sign(self._store, "GET", self._at(key), lasts))

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _asked(self, key: str = "") -> Iterator[None]:
        """Translate errors of the block, which asks the store, for `key` if that may be missing."""
        try:
            with _without_panic():
                yield
        except FileNotFoundError as error:
            self._see_mark(error)
            raise FileNotFoundError(f"no blob {key}") from None
        except (BaseError, Panicked) as error:
            raise self._away(error) from None

    def _see_mark(self, error: Exception) -> None:
        """Raise StoreAway if the mark is missing, too: then it is the bucket that is missing."""
        try:
            with _without_panic():
                obstore.get(self._store, self._at(MARK))
        except FileNotFoundError:
            raise self._away(error) from None
        except (BaseError, Panicked) as other:
            raise self._away(other) from None

    def _away(self, error: Exception) -> StoreAway:
        code, what = _reason(error)
        if time.monotonic() - self._said >= SAY_AGAIN_S:
            self._said = time.monotonic()
            remedy = f": {_REMEDIES[code]}" if code in _REMEDIES else ""
            log.warning("the object store %s at %s does not answer (%s)%s", self.url, self._endpoint, what, remedy)
        return StoreAway(f"the server's object store does not answer ({code})")


def _check_environment() -> None:
    """Raise SettingsError for a variable that cannot be part of a request's address or headers."""
    for name in (*_ADDRESSES, *_SENT):
        value = os.environ.get(name, "")
        if not all("!" <= sign <= "~" for sign in value):
            raise SettingsError(f"{name}: it has a space, an end of line or a sign beyond ASCII: set it without")
        if value and name in _ADDRESSES and not _is_address(value):
            raise SettingsError(f"{name}: must be http://HOST or https://HOST, and may have a port")
    file = os.environ.get(_TOKEN_FILE)
    if not file or os.environ.get("AWS_ACCESS_KEY_ID"):
        return
    try:
        token = Path(file).read_bytes()
    except OSError as error:
        raise SettingsError(f"{_TOKEN_FILE}: {file} cannot be read ({error.strerror}): name one that can") from None
    if not re.fullmatch(rb"[ -~]+", token):
        raise SettingsError(f"{_TOKEN_FILE}: {file} must be ASCII without an end of line: write it with printf '%s'")


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@contextmanager
def _without_panic() -> Iterator[None]:
    """Raise a panic of the client, which is in Rust, as an ordinary error: its class cannot be imported, and is no
    Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise Panicked from None
        raise


def _reason(error: Exception) -> tuple[str, str]:
    """The store's own error code, or one of ours, and what it means. Nothing else of an answer is passed on: it may
    repeat what was sent."""
    if isinstance(error, Panicked):
        return "Malformed", "the environment's settings cannot be sent"
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if code is not None:
        return code[1], code[1]
    # the addresses at which machines, containers and pods ask for their role's credentials
    if "http://169.254." in text:
        return "NoCredentials", "no credentials"
    if isinstance(error, FileNotFoundError):
        return "NoSuchBucket", "NoSuchBucket"
    status = re.search(r"status(?: code)?:? (\d\d\d)", text)
    if status is not None:
        return f"HTTP{status[1]}", f"HTTP {status[1]}"
    if "credential" in text.lower():  # not in an answer, which may contain the word for any reason
        return "NoCredentials", "no credentials"
    if any(word in text.lower() for word in ("connect", "dns", "timed out", "timeout", "sending request")):
        return "Unreachable", "it cannot be reached, or is too slow"
    return type(error).__name__, type(error).__name__
