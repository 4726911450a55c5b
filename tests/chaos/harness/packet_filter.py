"""A partition for real: the kernel drops what comes in at chosen sockets of other processes.

A socket of another process is fetched with pidfd_getfd(2), and a classic BPF program put on it
(socket(7), SO_ATTACH_FILTER): what it rejects is dropped before TCP sees it, so that nothing is
acknowledged, the sender sends again and again, and when the filter goes all goes on, as behind a
cable that was pulled. A filter on a listening socket drops those who would connect. It needs no
firewall and no namespace, only the right to trace the process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN = 0x06
_LOAD_WORD = 0x20
_JUMP_IF_GREATER = 0x25
_ALL_BYTES = 0xFFFF_FFFF
_RANDOM = 0xFFFF_F000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM: reads a random word."""

Program = tuple[tuple[int, int, int, int], ...]
"""Instructions: operation, jump if true, jump if false, operand."""


def losing(share: float) -> Program:
    """Drops that share of the packets; 1 drops all."""
    if share >= 1.0:
        return ((_RETURN, 0, 0, 0),)
    return (
        (_LOAD_WORD, 0, 0, _RANDOM),
        (_JUMP_IF_GREATER, 0, 1, int(share * _ALL_BYTES)),
        (_RETURN, 0, 0, _ALL_BYTES),
        (_RETURN, 0, 0, 0),
    )


def attach(taken: socket.socket, program: Program) -> None:
    """Put the program on a socket, in the place of one that is there."""
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(instructions)
    header = struct.pack("HL", len(program), ctypes.addressof(memory))
    taken.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def detach(taken: socket.socket) -> None:
    """Take the program away."""
    taken.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def take_socket(pid: int, descriptor: int) -> socket.socket:
    """A socket of another process as one of this process too. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if taken < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(process)
    return socket.socket(fileno=taken)
