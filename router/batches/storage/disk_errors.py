"""Recognizes the errors of a disk on which nothing can be stored."""

from __future__ import annotations

import errno
import sqlite3

from baton.errors import StorageFull

_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)
_SQLITE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PERM,
    }
)
_PRIMARY = 0xFF
"""Bits of SQLite's primary error codes; those above say more about the place of the error."""


def storage_error(error: OSError | sqlite3.Error) -> StorageFull | None:
    """Return the error that clients get if ``error`` means that the disk is full, read-only or
    broken; otherwise None."""
    if isinstance(error, OSError):
        known, why = error.errno in _ERRNOS, error.strerror or type(error).__name__
    else:
        # Errors of the module itself, such as a wrong use of it, have no code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
        known, why = code & _PRIMARY in _SQLITE, str(error)
    if not known:
        return None
    return StorageFull(
        f"nothing can be stored now ({why}): the operator frees or repairs the disk of data_dir"
    )
