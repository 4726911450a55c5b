"""How much tenants may store: files, files that arrive, and results of batches that run.

An upload reserves room in the table of uploads before it is written, so that the uploads of all
router processes together stay within the quota.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from baton.errors import RequestTooLarge

MAX_FILES_OF_TENANT = 1000
"""Maximum files of a tenant, with those that arrive. Results of batches may exceed it."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Maximum sizes, in bytes."""

    of_tenant: int
    total: int
    """Of all tenants."""


def room_of(
    connection: sqlite3.Connection, tenant: str, quota: Quota, *, upload_id: str = ""
) -> int:
    """Bytes that a tenant may store besides what is there, the upload ``upload_id`` left out."""
    held, total = connection.execute(
        "SELECT coalesce(sum(iif(tenant = :tenant, size, 0)), 0), coalesce(sum(size), 0) FROM"
        " (SELECT tenant, size FROM files"
        " UNION ALL SELECT tenant, size FROM uploads WHERE id != :upload_id"
        " UNION ALL SELECT tenant, result_bytes FROM batches WHERE result_bytes > 0)",
        {"tenant": tenant, "upload_id": upload_id},
    ).fetchone()
    return int(min(quota.of_tenant - held, quota.total - total))


def reserve(
    connection: sqlite3.Connection,
    upload_id: str,
    tenant: str,
    size: int,
    ahead: int,
    quota: Quota,
) -> int:
    """Give an upload room for ``size`` bytes in all, and up to ``ahead`` more while room is ample.

    Called within a transaction. Returns the bytes that the upload has room for. Raises
    RequestTooLarge.
    """
    (files,) = connection.execute(
        "SELECT (SELECT count(*) FROM files WHERE tenant = :tenant)"
        " + (SELECT count(*) FROM uploads WHERE tenant = :tenant AND id != :upload_id)",
        {"tenant": tenant, "upload_id": upload_id},
    ).fetchone()
    if files >= MAX_FILES_OF_TENANT:
        raise RequestTooLarge(
            f"there is no room: {files} files are kept, and {MAX_FILES_OF_TENANT} are possible;"
            " delete some"
        )
    room = room_of(connection, tenant, quota, upload_id=upload_id)
    if room < size:
        raise RequestTooLarge(
            f"there is no room: files and results may take {max(0, room)} bytes more; delete some"
            " files"
        )
    granted = size + min(ahead, (room - size) // 4)
    connection.execute(
        "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (upload_id, tenant, granted)
    )
    return granted
