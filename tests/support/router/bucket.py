"""A bucket on a real server with the S3 protocol, in this process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "baton-files"


@contextmanager
def bucket_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start the server with an empty bucket, and set the environment for its clients. Yields the
    bucket's URL. Skips the test where the server is not installed."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto, a server with the S3 protocol, is not installed")
    import boto3  # noqa: PLC0415
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        client = boto3.session.Session().client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.stop()
