"""Free space and size of a folder's file system, as metrics."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from prometheus_client import Gauge


def look_at_disk(folder: Path, free_bytes: Gauge, total_bytes: Gauge) -> None:
    """Set the metrics. A folder that does not exist yet is in the file system of its parent."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    # The folder may be removed at this moment.
    with contextlib.suppress(OSError):
        if there is not None:
            disk = shutil.disk_usage(there)
            free_bytes.set(disk.free)
            total_bytes.set(disk.total)
