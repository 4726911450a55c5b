"""Storage quotas of tenants: files, uploads in progress, and results of running batches.

An upload reserves room in the table of uploads before it is written, so that the uploads of all
router processes together stay within the quota.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from baton.errors import RequestTooLarge

MAX_FILES_OF_TENANT = 1000
"""Maximum number of files of a tenant, including uploads in progress. Result files of batches may
exceed this number."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Maximum sizes of stored files, in bytes."""

    of_tenant: int
    total: int
    """Maximum size of the files of all tenants together."""


def room_of(
    connection: sqlite3.Connection, tenant: str, quota: Quota, *, upload_id: str = ""
) -> int:
    """Return the bytes that a tenant may still store, without counting the upload ``upload_id``."""
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
    """Reserve room so that an upload has ``size`` bytes in all, and up to ``ahead`` more if there
    is ample room.

    Called within a transaction. Returns the reserved bytes. Raises RequestTooLarge.
    """
    (files,) = connection.execute(
        "SELECT (SELECT count(*) FROM files WHERE tenant = :tenant)"
        " + (SELECT count(*) FROM uploads WHERE tenant = :tenant AND id != :upload_id)",
        {"tenant": tenant, "upload_id": upload_id},
    ).fetchone()
    if files >= MAX_FILES_OF_TENANT:
        raise RequestTooLarge(
            f"the tenant has {files} files, and {MAX_FILES_OF_TENANT} are the maximum; delete some"
        )
    room = room_of(connection, tenant, quota, upload_id=upload_id)
    if room < size:
        raise RequestTooLarge(
            f"the storage quota has room for {max(0, room)} bytes more; delete some files"
        )
    granted = size + min(ahead, (room - size) // 4)
    connection.execute(
        "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (upload_id, tenant, granted)
    )
    return granted
