"""The object store of a fleet: a bucket, or a directory, by obstore.

Objects are immutable and most are named by their content, so that writing one twice is harmless.
Calls block and retry after network errors; the daemon makes them in threads.
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from .. import errors
from ..errors import full_disk_named

# of a directory's file system; of HTTP; of MinIO and Ceph
_FULL = re.compile(r"No space left|quota exceeded|507 Insufficient|StorageFull|QuotaExceeded")
_PROBE_BYTES = 64 * 1024  # a directory on a full disk takes an empty object
# `read_timeout` is of a request without a byte of its answer, which ends a store that accepts and
# never answers; what one request sends, two parts at a time, takes less above 0.6 MB/s. `timeout`
# is of a whole request, with the body of a large pack.
_CLIENT = {
    "connect_timeout": "5s", "read_timeout": "60s", "timeout": "24h", "user_agent": "mirrord"
}  # fmt: skip
_SILENT_S = 15.0  # a request that waits so long for a byte is told by health
_OPTIONS: dict[str, Any] = {
    # object_store's own: 10 retries within three minutes, for which a sync would wait
    "retry_config": {
        "max_retries": 5,
        "retry_timeout": timedelta(seconds=30),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    },
}


class ObjectInfo(NamedTuple):
    """An object in the store; `written_at` is by the store's clock."""

    key: str
    size_bytes: int
    written_at: datetime


class Blob(NamedTuple):
    """The expected content of an object: SHA-256 in hex, and size."""

    sha256: str
    size_bytes: int


# S3 takes parts from 5 MiB on, and at most 10,000: 160 GB
_PART_BYTES = 16 * 1024**2
_MULTIPART_BYTES = 2 * _PART_BYTES  # a larger file is sent in parts, which takes no condition


class ObjectStore:
    """Objects below one prefix. Raises StoreUnavailableError where the store does not answer."""

    def __init__(self, url: str) -> None:
        """Open the store of a URL without a request; raises InvalidUrlError."""
        self.shown = url  # config.py refuses a URL with secrets
        self._waiting: dict[object, float] = {}  # requests: when each began, or had its last bytes
        hint = "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path"
        try:
            if url.startswith("file://"):
                root = Path(unquote(urlsplit(url).path))
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store: Any = LocalStore(root)
            else:
                # obstore ignores this variable where it gets client options
                http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"}
                client: Any = _CLIENT | ({"allow_http": True} if http else {})
                self._store = from_url(url, client_options=client, **_OPTIONS)
        except (exceptions.BaseError, ValueError) as error:
            # obstore adds a dump of the causes below the first line
            fact = str(error).partition("\n")[0]
            raise errors.InvalidUrlError(f"cannot open store {url}: {fact}", hint=hint) from error
        except OSError as error:
            raise errors.ResourceError(f"cannot open store {url}: {error.strerror}") from error

    def put(self, key: str, content: bytes, *, replace: bool = False) -> bool:
        """Write an object; False where it exists already, unless `replace`."""
        mode: Literal["create", "overwrite"] = "overwrite" if replace else "create"
        with self._translated(f"write {key}"):
            try:
                # by default obstore sends what is large in parts, which takes no condition
                obstore.put(self._store, key, content, mode=mode, use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
        return True

    def put_file(self, key: str, path: Path, *, replace: bool = False) -> bool:
        """Write a file as an object named by its content; False where it exists already.

        `replace` overwrites an existing one, which may be damaged.
        """
        size = path.stat().st_size
        if size <= _MULTIPART_BYTES:
            return self.put(key, path.read_bytes(), replace=replace)
        with self._translated(f"write {key}", is_timed=False):
            try:
                # not safe from a race, which is harmless: both write the same bytes
                if not replace and obstore.head(self._store, key)["size"] == size:
                    return False
            except (exceptions.NotFoundError, FileNotFoundError):
                pass
            # each concurrent part is in memory
            obstore.put(self._store, key, path, chunk_size=_PART_BYTES, max_concurrency=2)
        return True

    def get(self, key: str, *, limit_bytes: int) -> bytes | None:
        """Read an object, or None; raises StoreDamagedError where it is over the limit."""
        with self._translated(f"read {key}"):
            try:
                answer = obstore.get(self._store, key)
                if answer.meta["size"] > limit_bytes:
                    fact = f"it has {answer.meta['size']} bytes, and {limit_bytes} are allowed"
                    raise errors.StoreDamagedError(f"cannot read {key} of the store: {fact}")
                return bytes(answer.bytes())
            except (exceptions.NotFoundError, FileNotFoundError):
                return None

    def download(self, key: str, path: Path, blob: Blob, *, tries: int = 3) -> None:
        """Download an object into a new file, flushed; raises StoreDamagedError for other bytes.

        Tries again, because a cache or a broken connection may be at fault.
        """
        for left in reversed(range(tries)):
            try:
                self._download(key, path, blob)
                return
            except (errors.StoreDamagedError, errors.StoreUnavailableError):
                path.unlink(missing_ok=True)
                if not left:
                    raise

    def _download(self, key: str, path: Path, blob: Blob) -> None:
        digest, size = hashlib.sha256(), 0
        with (
            self._translated(f"read {key}") as request,
            full_disk_named(path.name),
            path.open("wb") as file,
        ):
            try:
                # fewer, larger pieces: each is a call into Rust and one into hashlib
                for piece in obstore.get(self._store, key).stream(min_chunk_size=1 << 20):
                    self._waiting[request] = time.monotonic()
                    size += len(piece)
                    # what grew in the store must not fill this disk
                    if size > blob.size_bytes:
                        break
                    digest.update(piece)
                    file.write(piece)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                failure = f"cannot read {key} of the store: it is gone"
                raise errors.StoreDamagedError(failure, object=key) from error
            file.flush()
            os.fsync(file.fileno())
        if (digest.hexdigest(), size) != blob:
            failure = f"cannot use {key} of the store: checksum or size mismatch"
            raise errors.StoreDamagedError(failure, object=key)

    def iterate(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects below `prefix`, which ends with a slash."""
        with self._translated(f"list {prefix}", is_timed=False):
            # a prefix is of whole segments: `a/b` does not list `a/bc`
            for batch in obstore.list(self._store, prefix.rstrip("/")):
                for meta in batch:
                    yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"])

    def directories(self, prefix: str) -> list[str]:
        """List the directories right below `prefix`, which ends with a slash."""
        with self._translated(f"list {prefix}"):
            listed = obstore.list_with_delimiter(self._store, prefix.rstrip("/"))
            return sorted(path.rpartition("/")[2] for path in listed["common_prefixes"])

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects, in any order; one that is already gone is no error."""
        with self._translated("delete objects"):
            # S3 deletes what is gone without an error, a directory does not
            if not isinstance(self._store, LocalStore):
                obstore.delete(self._store, list(keys))  # a thousand per request
                return
            for key in keys:
                with suppress(exceptions.NotFoundError, FileNotFoundError):
                    obstore.delete(self._store, key)

    def probe_write(self) -> None:
        """Write and delete an object; raises StoreFullError, StoreUnavailableError."""
        key = f"checks/{secrets.token_hex(16)}"
        self.put(key, os.urandom(_PROBE_BYTES))
        self.delete([key])

    def check(self) -> None:
        """Write, read and delete an object, and check that a second write of it is refused.

        Raises StoreUnavailableError, or ResourceError for a store that ignores conditions: two
        writers of one name would then both succeed.
        """
        key = f"checks/{secrets.token_hex(16)}"
        if not self.put(key, b"first"):
            fact = "it refuses an object that it does not have"
            raise errors.ResourceError(f"cannot use store {self.shown}: {fact}")
        try:
            if self.put(key, b"second"):
                raise errors.ResourceError(
                    f"cannot use store {self.shown}: it ignores conditional writes",
                    hint="use a store with If-None-Match: S3, GCS, Azure, MinIO, Ceph from 19.2",
                )
            if self.get(key, limit_bytes=100) != b"first":
                fact = "it does not return what was written"
                raise errors.ResourceError(f"cannot use store {self.shown}: {fact}")
        finally:
            with suppress(errors.StoreUnavailableError):  # the right to delete is not needed
                self.delete([key])

    def is_silent(self) -> bool:
        """Return whether a request has waited long for a byte."""
        past = time.monotonic() - _SILENT_S
        return any(heard < past for heard in tuple(self._waiting.values()))

    @contextmanager
    def _translated(self, doing: str, *, is_timed: bool = True) -> Iterator[object]:
        request = object()
        if is_timed:
            self._waiting[request] = time.monotonic()
        try:
            yield request
        except (exceptions.BaseError, OSError) as error:
            raise _translate(error, f"cannot {doing} in store {self.shown}") from error
        finally:
            self._waiting.pop(request, None)


_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)


def _translate(error: Exception, failure: str) -> errors.StoreUnavailableError:
    if _FULL.search(str(error)):
        hint = "free space in the store; refused publications are retried"
        return errors.StoreFullError(f"{failure}: it has no room", hint=hint)
    if isinstance(error, _REFUSALS):
        hint = "check the store's credentials: docs/fleet.md names where they are looked for"
        return errors.StoreUnavailableError(f"{failure}: access denied", hint=hint)
    hint = "check that it is up and can be reached; this machine's disk is served meanwhile"
    fact = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0][:200]
    return errors.StoreUnavailableError(f"{failure}: {fact}", hint=hint)
