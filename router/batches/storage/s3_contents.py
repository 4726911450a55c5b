"""Contents in a bucket of a server with the S3 protocol.

The library finds endpoint, region and credentials as other programs do: in ``AWS_ENDPOINT_URL_S3``,
``AWS_REGION`` and ``AWS_ACCESS_KEY_ID``, in a file, or from the role of the pod.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from baton.errors import ConfigError, Unavailable
from baton.extras import needs_extra
from router.batches.storage.contents import Reader

log = logging.getLogger(__name__)

CONNECT_S = 5.0
ANSWER_S = 20.0
"""Maximum seconds between two pieces of an answer of the server."""
_TRIES = 3
"""Maximum number of times that a call is tried."""
_RETRY_S = 5.0
_DELETED_TOGETHER = 1000
"""Maximum number of objects that one call deletes: the protocol's bound."""
_MISSING = ("404", "NoSuchKey", "NotFound")


class S3Contents:
    """Contents in a bucket. Each attempt of a call has the deadlines of this module."""

    def __init__(self, url: str, folder: Path) -> None:
        """Create contents at ``url``, which is ``s3://bucket/prefix``. ``folder`` is on this
        machine, for files that are being written. Raises ConfigError if the extra is not
        installed, or if the environment does not fit."""
        with needs_extra("s3", f"batch_store {url}"):
            import boto3  # noqa: PLC0415
            import botocore.config  # noqa: PLC0415
            import botocore.exceptions  # noqa: PLC0415
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        self._folder = folder
        settings = botocore.config.Config(
            connect_timeout=CONNECT_S,
            read_timeout=ANSWER_S,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
        )
        try:
            self._client: Any = boto3.session.Session().client("s3", config=settings)
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise ConfigError(f"batch_store {url}: {error}") from error
        self._refused = botocore.exceptions.ClientError
        self._failures = (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            boto3.exceptions.Boto3Error,
        )

    @property
    def incoming(self) -> Path:
        return self._folder / "incoming"

    def prepare(self) -> None:
        self.incoming.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, path: Path, name: str) -> None:
        with self._calls():
            # One call for a small file, parallel parts for a large one.
            self._client.upload_file(str(path), self._bucket, self._prefix + name)
        path.unlink()

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        for start in range(0, len(keys), _DELETED_TOGETHER):
            some = {"Objects": keys[start : start + _DELETED_TOGETHER], "Quiet": True}
            with self._calls():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=some)
            if failed := answer.get("Errors"):
                raise _unavailable(failed[0].get("Code"))

    def path(self, name: str) -> None:
        return None

    def open(self, name: str) -> Reader:
        with self._calls():
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        return _Body(answer["Body"], self._calls)

    def signs(self) -> dict[str, str]:
        found = {}
        pages = self._client.get_paginator("list_objects_v2")
        for kind in ("files/", "parts/"):
            with self._calls():
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + kind):
                    for one in page.get("Contents", ()):
                        sign = f"{one['ETag']} {one['Size']}"
                        found[one["Key"].removeprefix(self._prefix)] = sign
        return found

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        """Convert the library's errors to FileNotFoundError and Unavailable."""
        try:
            yield
        except self._failures as error:
            code = None
            if isinstance(error, self._refused):
                code = str(error.response.get("Error", {}).get("Code"))
            if code in _MISSING:
                raise FileNotFoundError(code) from None
            log.warning("files and batches: %s", error)
            raise _unavailable(code or type(error).__name__) from error


class _Body:
    """An object that is being read."""

    def __init__(self, body: Any, calls: Any) -> None:
        self._body = body
        self._calls = calls

    def read(self, size: int, /) -> bytes:
        with self._calls():
            return cast(bytes, self._body.read(size))

    def close(self) -> None:
        self._body.close()


def _unavailable(reason: object) -> Unavailable:
    # A message of the server may name buckets and accounts: clients do not see it.
    return Unavailable(f"the store of files does not answer ({reason})", retry_after=_RETRY_S)
