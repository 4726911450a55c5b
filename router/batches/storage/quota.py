"""Storage quotas of tenants: files, uploads in progress, and results of running batches.

An upload reserves room before it is written, so that the uploads of all router processes together
stay within the quota.
"""

from __future__ import annotations

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


def too_many_files(files: int) -> RequestTooLarge:
    """Build the error for an upload of a tenant that has ``files`` files already."""
    return RequestTooLarge(
        f"the tenant has {files} files, and {MAX_FILES_OF_TENANT} are the maximum; delete some"
    )


def no_room(room: int) -> RequestTooLarge:
    """Build the error for an upload that needs more than the quota's ``room``, in bytes."""
    return RequestTooLarge(
        f"the storage quota has room for {max(0, room)} bytes more; delete some files"
    )
