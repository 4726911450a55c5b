"""Hands a worker's shared KV pool to workers in other containers of the same node.

Containers have process namespaces of their own, so ``open_shared`` cannot open the pool through
/proc. Instead, the owner listens on a Unix socket in a folder that the containers share (a volume),
and passes a descriptor of the pool, which can only be read (unix(7), SCM_RIGHTS). The caller shows
a token that it got with the offer over the pair's own gRPC stream, and runs as the same user.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.memory import SharedFile
from kvtransfer.memory.shared_pool import map_shared

TOKEN_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{16}\.sock")
_HELLO_S = 0.25
"""Maximum time that either end waits for the other one, in seconds. A transport must not hold the
event loop for longer."""
_CREDENTIALS = struct.Struct("3i")
"""The answer of SO_PEERCRED: pid, uid, gid."""

log = logging.getLogger(__name__)


class PoolSocket:
    """The owner's end: a socket and the thread that serves it, until ``close``."""

    def __init__(self, folder: Path, file: SharedFile) -> None:
        """Listen in ``folder``, and remove sockets there that ended processes have left. Raises
        ConfigError."""
        self._descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.name = f"{secrets.token_hex(8)}.sock"
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self._path = folder / self.name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_left(folder)
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            os.close(self._descriptor)
            raise ConfigError(
                f"shm_folder {folder}: cannot make a socket there: {error}. It must be a folder on "
                "a volume that the node's workers share, with a short path"
            ) from error
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="pool-socket", daemon=True).start()

    def close(self) -> None:
        """Hand out no more descriptors; idempotent. Pools that are mapped stay."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError:
                # It was closed, or the process has no descriptor left for now.
                self._closed.wait(_HELLO_S)
                continue
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_HELLO_S)
                if self._is_welcome(caller):
                    socket.send_fds(caller, [b"\0"], [self._descriptor])
                else:
                    log.warning("a process without the token asked for the KV pool")
        os.close(self._descriptor)

    def _is_welcome(self, caller: socket.socket) -> bool:
        told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(told)[1] != os.getuid():
            return False
        shown = b""
        while len(shown) < TOKEN_BYTES and (piece := caller.recv(TOKEN_BYTES - len(shown))):
            shown += piece
        return hmac.compare_digest(shown, self.token.encode())


def fetch_shared(
    folder: Path, name: str, token: str, inode: int, size: int
) -> npt.NDArray[np.uint8]:
    """Map the pool whose owner listens at the socket ``name`` in ``folder``: read-only, uint8
    [size]. It takes a quarter of a second at most.

    ``inode`` and ``size`` identify the expected file. Raises HandoffError.
    """
    if not _NAME.fullmatch(name):
        raise HandoffError("the offer of transport shm names no socket of a KV pool")
    told = f"the KV pool at {name}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as owner:
            owner.settimeout(_HELLO_S)
            owner.connect(str(folder / name))
            owner.sendall(token.encode())
            _, descriptors, _, _ = socket.recv_fds(owner, 1, 1)
    except OSError as error:
        raise HandoffError(f"{told} cannot be opened: {error}") from error
    if not descriptors:
        raise HandoffError(f"{told} was refused")
    return map_shared(descriptors[0], inode, size, told)


def _remove_left(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        if not _NAME.fullmatch(path.name) or path.stat().st_uid != os.getuid():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_HELLO_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # it may be busy
