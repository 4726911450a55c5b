"""The version of Baton, and of the formats that the processes of a cluster share.

The version stands here alone: packages, image and chart take it from here.
"""

from __future__ import annotations

VERSION = "0.1.0"
SCHEMA = 1
"""Version of the formats that processes share: registry records, gRPC messages and values in Redis.

A release that gives them a meaning which its predecessor does not know raises it, by one. It still
writes what the predecessor can read. 0 stands for Baton 0.1.0, whose processes name no schema."""


def skew_error(schema: int, version: str) -> str:
    """Return why this process cannot work with a process that has ``schema`` and the Baton version
    ``version``. Empty if it can: the schemas differ by at most one."""
    if abs(schema - SCHEMA) <= 1:
        return ""
    older = "this process" if schema > SCHEMA else "the other one"
    return (
        f"Baton {version or 'of an unknown version'} with schema {schema} does not work with Baton "
        f"{VERSION} with schema {SCHEMA}: upgrade {older}, one release at a time"
    )
