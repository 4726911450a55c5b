"""Whether files, batches and bills can be stored, before a router starts."""

from __future__ import annotations

import errno
import tempfile

from baton.config.cluster import Config
from baton.errors import ConfigError

_TRIED_BYTES = 64 << 10
"""Number of bytes that are written in order to see whether a folder can be written."""


def check_data_dir(config: Config) -> str:
    """Return advice if nothing can be stored in the folder of files and batches now; otherwise no
    text.

    The cluster serves without it. Raises ConfigError if the folder is a configured one that cannot
    be written for a reason other than its disk's space.
    """
    folder = config.data_folder
    # The folder itself is made for the first file.
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is a file")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        wrong = f"data_dir {folder} cannot be written ({error.strerror})"
        if config.data_dir and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"{wrong}: set --data-dir to a folder that this user can write"
            ) from error
        return f"{wrong}: until it can, uploads and batches get 507 storage_full"
    return ""
