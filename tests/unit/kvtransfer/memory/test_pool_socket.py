"""A pool that is handed out through a socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.errors import ConfigError, HandoffError
from kvtransfer.memory.pool_socket import TOKEN_BYTES, PoolSocket, fetch_shared
from kvtransfer.memory.shared_pool import SharedPool, allocate, inode_of

SIZE = 1 << 16


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = allocate(SIZE)
    made.data[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    yield made
    made.close()


@pytest.fixture
def owner(tmp_path: Path, pool: SharedPool) -> Iterator[PoolSocket]:
    made = PoolSocket(tmp_path, pool.file)
    yield made
    made.close()


def test_a_process_with_the_token_reads_the_pool_and_cannot_write_it(
    tmp_path: Path, pool: SharedPool, owner: PoolSocket
) -> None:
    file = pool.file
    seen = fetch_shared(tmp_path, owner.name, owner.token, inode_of(file), file.bytes)
    assert np.array_equal(seen[:SIZE], pool.data)
    pool.data[5] = 77
    assert seen[5] == 77
    assert not seen.flags.writeable
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(str(tmp_path / owner.name))
        caller.sendall(owner.token.encode())
        _, (descriptor,), _, _ = socket.recv_fds(caller, 1, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)


@pytest.mark.parametrize("token", ["0" * TOKEN_BYTES, "", "short"])
def test_others_get_nothing_and_hold_up_no_process(
    tmp_path: Path, pool: SharedPool, owner: PoolSocket, token: str
) -> None:
    file = pool.file
    with pytest.raises(HandoffError):
        fetch_shared(tmp_path, owner.name, token, inode_of(file), file.bytes)
    # An end that says nothing must not keep the next one waiting for long.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(tmp_path / owner.name))
        silent.shutdown(socket.SHUT_WR)
        fetch_shared(tmp_path, owner.name, owner.token, inode_of(file), file.bytes)


@pytest.mark.parametrize("name", ["../secret.sock", "/etc/passwd", "", "0123456789abcdef.sock"])
def test_an_offer_names_a_socket_of_the_folder_or_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(HandoffError):
        fetch_shared(tmp_path, name, "0" * TOKEN_BYTES, 1, SIZE)


def test_another_file_is_refused(tmp_path: Path, pool: SharedPool, owner: PoolSocket) -> None:
    with pytest.raises(HandoffError, match="is not the one that was offered"):
        fetch_shared(tmp_path, owner.name, owner.token, inode_of(pool.file), SIZE // 2)


def test_sockets_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, pool: SharedPool, owner: PoolSocket
) -> None:
    dead = tmp_path / f"{'0' * 16}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(dead))
    other = tmp_path / "another.sock"
    other.touch()
    second = PoolSocket(tmp_path, pool.file)
    assert {path.name for path in tmp_path.iterdir()} == {owner.name, second.name, other.name}
    second.close()
    second.close()
    assert {path.name for path in tmp_path.iterdir()} == {owner.name, other.name}


def test_a_folder_that_does_not_serve_is_reported(tmp_path: Path, pool: SharedPool) -> None:
    with pytest.raises(ConfigError, match="shm_folder"):
        PoolSocket(tmp_path / "missing", pool.file)
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="with a short path"):
        PoolSocket(deep, pool.file)
