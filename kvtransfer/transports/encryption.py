"""AES-GCM on the transports whose bytes others on the network could read and change.

Each part of a block is encrypted by itself. On the wire it is

    nonce (12 bytes) | ciphertext (as long as the part) | tag (16 bytes)

The receiver draws the key of a link: one direction between two ranks. Its answer on the pair's gRPC
stream carries the key, and the transport's own connections never do. A new pair, also after a
failure or a restart, has a new key.

**Nonces.** Only the writer's end of a link encrypts by its key. That end counts its parts, and the
count is the nonce. So a part that is encrypted again gets another nonce, whatever the reason.

**Places.** The tag also covers the number of the batch, the index of the part in it, and where the
part is in the writer's blocks. The receiver takes these from the batch's announcement. So a part
passes at its own place only, and once: a pair uses each number once.

**Bounds.** A changed part passes with a probability of at most (L + 2) / 2^128, if it has L blocks
of 16 bytes: 2^-109 for a part of 8 MiB (NIST SP 800-38D; McGrew and Viega, "The Security and
Performance of the Galois/Counter Mode of Operation", 2004). SP 800-38D allows 2^32 parts a key if
nonces are random. These are not.
"""

from __future__ import annotations

import secrets
import struct
import threading

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import HandoffError
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transport import AnnouncedBatch, Parts, damaged

KEY_BYTES = 16
NONCE_BYTES = 12
_TAG_BYTES = 16
OVERHEAD = NONCE_BYTES + _TAG_BYTES
"""Bytes by which a part is longer on the wire."""
UNENCRYPTED = "sends KV blocks unencrypted: it has an older version of Baton, so upgrade it"
"""What is wrong with a peer whose offer or answer is of a version without encryption."""
_PLACE = struct.Struct("<QIQQ")


def new_key() -> bytes:
    """Draw the key of a link: KEY_BYTES bytes."""
    return secrets.token_bytes(KEY_BYTES)


def read_key(told: str) -> bytes:
    """Read the key in a receiver's answer, in hexadecimal digits. Raises HandoffError if it is
    none."""
    try:
        key = bytes.fromhex(told)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        # The text itself must not be shown: it may be a key.
        raise HandoffError(f"a receiver's answer has no key of {KEY_BYTES} bytes")
    return key


class Encryptor:
    """The writer's end of a link. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        """``key`` was drawn for this link; nothing else may encrypt by it."""
        self._cipher = AESGCM(key)
        self._used = 0
        self._lock = threading.Lock()

    def encrypt(
        self, memory: BlockMemory, number: int, parts: Parts, first: int, outs: list[memoryview]
    ) -> None:
        """Encrypt parts of batch ``number``, from part ``first`` on, each into its own buffer of
        ``outs``: the part's length and OVERHEAD bytes.

        Raises HandoffError for a part that ``memory`` does not have.
        """
        with self._lock:
            nonces = range(self._used, self._used + len(outs))
            self._used = nonces.stop
        for index, (count, out) in enumerate(zip(nonces, outs, strict=True), first):
            nonce = count.to_bytes(NONCE_BYTES, "big")
            out[:NONCE_BYTES] = nonce
            place = _place(number, index, parts)
            with memory.reading(parts.blocks[index], parts.offset, parts.length) as data:
                self._cipher.encrypt_into(nonce, data, place, out[NONCE_BYTES:])


class Decryptor:
    """The receiver's end of a link."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def decrypt(
        self, memory: BlockMemory, batch: AnnouncedBatch, index: int, data: memoryview
    ) -> None:
        """Decrypt part ``index`` of a batch into its target block.

        Raises ChecksumMismatch for bytes that the writer did not encrypt for this place. The target
        then holds anything.
        """
        source, target = batch.source, batch.target
        nonce, sealed = data[:NONCE_BYTES], data[NONCE_BYTES:]
        place = _place(batch.number, index, source)
        try:
            with memory.writing(target.blocks[index], target.offset, target.length) as out:
                self._cipher.decrypt_into(nonce, sealed, place, out)
        except InvalidTag:
            raise damaged(batch.number) from None


def wire_bytes(length: int) -> int:
    """Return the bytes on the wire of a part of ``length`` bytes."""
    return length + OVERHEAD


def _place(number: int, index: int, parts: Parts) -> bytes:
    return _PLACE.pack(number, index, parts.blocks[index], parts.offset)
