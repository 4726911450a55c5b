"""The MAC of a wire segment: the UMAC of 1999, NH with a secret key and then HMAC-SHA256.

A network that carries bytes without authentication may change them on purpose. The fixed keys of
``kvtransfer.memory.checksum`` would let an attacker find other bytes with an equal checksum. So
segments on such transports carry a MAC instead, from keys that only the two ends know.

A segment is cut into blocks of BLOCK_BYTES; zeros fill the last one to a multiple of 8 bytes. The
little-endian 32-bit words of a block are cut into a first and a second half ``a`` and ``b``. Each
block has STREAMS digests of 64 bits,

    digest[s] = sum over i of (a[i] + k[0, i + s]) * (b[i] + k[1, i + s])   mod 2^64

with the sums in brackets taken mod 2^32. The tag is the first 64 bits of HMAC-SHA256 over the
number of the segment in its batch, its length, and all digests.

**Forgery.** NH is 2^-32-almost-universal on strings of equal length, and with three keys that are
shifted by a pair (Toeplitz) 2^-96-almost-universal: Black, Halevi, Krawczyk, Krovetz, Rogaway,
"UMAC: Fast and Secure Message Authentication", CRYPTO 1999, theorems on NH and Toeplitz-NH. Two
different segments differ in a block, so their digests are equal with a probability of at most
2^-96. If they are not equal, a tag is right with a probability of 2^-64, as long as HMAC-SHA256 is
a pseudorandom function. So the probability that a changed segment passes is at most 2^-64 + 2^-96
plus the advantage against HMAC and SHAKE-256. One wrong segment ends the ticket, and the next has
other keys.

**Keys.** The receiver draws a secret for each pair, and sends it on the pair's gRPC stream. Each
batch derives its keys from the secret and its number, which a pair uses once. The number of the
segment is in the HMAC. So no tag of another pair, ticket, batch or segment is valid.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace
from hashlib import shake_256

import numpy as np
import numpy.typing as npt

from baton.errors import HandoffError

SECRET_BYTES = 32
BLOCK_BYTES = 4096
BLOCK_PAIRS = BLOCK_BYTES // 8
"""Pairs of words in a whole block: one word of each half."""
STREAMS = 3
KEY_WORDS = BLOCK_PAIRS + STREAMS - 1
"""Number of key words for each half of a block."""
_TAG_BYTES = 8
_HMAC_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The keys of one batch's MACs. ``of`` derives them."""

    words: npt.NDArray[np.uint32] = field(repr=False)
    """Keys of NH, uint32 [2, KEY_WORDS], contiguous."""
    outer: bytes = field(repr=False)
    """Key of the HMAC."""
    first: int = 0
    """Number in the batch of the first segment whose tag is computed."""

    @classmethod
    def of(cls, secret: bytes, number: int) -> BatchKey:
        """Derive the keys of batch ``number``, from 0, of a pair.

        Raises HandoffError if ``secret`` has not SECRET_BYTES bytes.
        """
        if len(secret) != SECRET_BYTES:
            raise HandoffError(f"a pair's secret has {len(secret)} bytes, not {SECRET_BYTES}")
        drawn = shake_256(b"baton kv mac 1" + secret + number.to_bytes(8, "little")).digest(
            _HMAC_KEY_BYTES + 8 * KEY_WORDS
        )
        words = np.frombuffer(drawn, dtype="<u4", offset=_HMAC_KEY_BYTES)
        return cls(words.astype(np.uint32).reshape(2, KEY_WORDS), drawn[:_HMAC_KEY_BYTES])

    def starting_at(self, position: int) -> BatchKey:
        """Return the keys for the batch's segments from ``position`` on."""
        return replace(self, first=self.first + position)

    def tags(self, digests: npt.NDArray[np.uint64], length: int) -> tuple[int, ...]:
        """Return the tags of consecutive segments of ``length`` bytes.

        ``digests`` is uint64 [segments, blocks, STREAMS].
        """
        return tuple(
            self._tag(self.first + position, length, each) for position, each in enumerate(digests)
        )

    def _tag(self, segment: int, length: int, digests: npt.NDArray[np.uint64]) -> int:
        head = segment.to_bytes(8, "little") + length.to_bytes(8, "little")
        message = head + digests.astype("<u8", copy=False).tobytes()
        return int.from_bytes(hmac.digest(self.outer, message, "sha256")[:_TAG_BYTES], "little")


def blocks_of(length: int) -> int:
    """Return the number of blocks in a segment of ``length`` bytes."""
    return -(-length // BLOCK_BYTES)


def digests(data: bytes | memoryview, key: BatchKey) -> npt.NDArray[np.uint64]:
    """Compute the digests of a segment with numpy, uint64 [blocks, STREAMS]."""
    raw = np.frombuffer(data, dtype=np.uint8)
    whole = raw.size // BLOCK_BYTES
    out = np.empty((blocks_of(raw.size), STREAMS), dtype=np.uint64)
    out[:whole] = _nh(raw[: whole * BLOCK_BYTES].reshape(whole, BLOCK_BYTES), key)
    if whole < len(out):
        rest = raw[whole * BLOCK_BYTES :]
        padded = np.zeros(-(-rest.size // 8) * 8, dtype=np.uint8)
        padded[: rest.size] = rest
        out[whole:] = _nh(padded[None], key)
    return out


def _nh(blocks: npt.NDArray[np.uint8], key: BatchKey) -> npt.NDArray[np.uint64]:
    """Compute the digests of blocks of equal length: uint8 [blocks, bytes] → uint64 [blocks,
    STREAMS]."""
    words = blocks.view("<u4").astype(np.uint32, copy=False)
    pairs = words.shape[1] // 2
    left, right = words[:, :pairs], words[:, pairs:]
    sums = []
    for stream in range(STREAMS):
        first, second = key.words[:, stream : stream + pairs]
        product = np.multiply((left + first).astype(np.uint64), right + second, dtype=np.uint64)
        sums.append(product.sum(axis=1, dtype=np.uint64))
    return np.stack(sums, axis=1)
