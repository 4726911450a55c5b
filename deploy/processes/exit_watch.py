"""Learns how another process has ended, whether or not it is a child.

The kernel keeps the exit status of a process for those that hold a pidfd of it, since Linux 6.15
(``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT``, see pidfd_open(2)). Before, only its parent gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time

from deploy.processes.process_identity import ProcessIdentity

_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""``_IOWR(0xFF, 11, struct pidfd_info)``, with the structure's first size: 64 bytes."""
_INFO_EXIT = 1 << 3
_BYTES = 64
_EXIT_CODE_AT = 60
"""Offset of the exit code in bytes, after the mask, the cgroup's id, and eleven ids."""
_WAIT_S = 0.3
"""Time in which the parent of a process that has closed its connections collects it, in seconds."""
_POLL_S = 0.005


class ExitWatch:
    """Waits for the exit status of one process. Close it after use."""

    def __init__(self, process: ProcessIdentity) -> None:
        self.process = process
        self._descriptor: int | None = None
        if not process.is_near:
            return
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = os.pidfd_open(process.pid)
        if not process.is_running:
            # Another process may have got the number.
            self.close()

    async def exit_code(self) -> int | None:
        """Return the exit code of a process that ends now: minus its signal if a signal has ended
        it. None if it is unknown."""
        deadline = time.monotonic() + _WAIT_S
        # The pidfd is readable before the parent has collected the process.
        while self._is_open and time.monotonic() < deadline:
            if (code := self.look()) is not None:
                return code
            await asyncio.sleep(_POLL_S)
        return None

    def look(self) -> int | None:
        """Return what ``exit_code`` does, without waiting."""
        information = bytearray(struct.pack("<Q", _INFO_EXIT).ljust(_BYTES, b"\0"))
        try:
            if self._descriptor is not None:
                fcntl.ioctl(self._descriptor, _GET_INFO, information)
        except OSError:
            # An older kernel. Another look tells no more.
            self.close()
        if self._descriptor is None or not struct.unpack_from("<Q", information)[0] & _INFO_EXIT:
            return None
        return os.waitstatus_to_exitcode(struct.unpack_from("<i", information, _EXIT_CODE_AT)[0])

    @property
    def _is_open(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        """Release the kernel's record of the process; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
