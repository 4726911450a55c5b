"""KV blocks whose bytes tell which tokens they were computed from."""

from __future__ import annotations

from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import PartByPart, SharedFile, check_part
from tests.support.engine.fake_engine import kv_of

BLOCK_SIZE = 4
TOKEN_BYTES = 32
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


def kv_bytes(tokens: list[int]) -> bytes:
    """The KV of a sequence from its start: that of a token depends on all tokens up to it."""
    return b"".join(value.to_bytes(4, "little") * (TOKEN_BYTES // 4) for value in kv_of(tokens))


class SimulatedMemory(PartByPart):
    """Implements ``kvtransfer.memory.memory.BlockMemory``."""

    device = "cpu"
    block_bytes = BLOCK_BYTES

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._data = [bytearray(BLOCK_BYTES) for _ in range(blocks)]

    @property
    def shared_file(self) -> SharedFile | None:
        return None

    @property
    def address(self) -> int:
        raise NotImplementedError("its blocks are no memory of the machine")

    def checksum(self, block: int, offset: int, length: int) -> int:
        return checksum(self.part(block, offset, length))

    def read(self, block: int, offset: int, out: memoryview) -> int:
        out[:] = self.part(block, offset, out.nbytes)
        return checksum(bytes(out))

    def write(self, block: int, offset: int, data: memoryview) -> int:
        check_part(self, block, offset, data.nbytes)
        self._data[block][offset : offset + data.nbytes] = data
        return checksum(bytes(data))

    def part(self, block: int, offset: int, length: int) -> bytes:
        """A copy of part of a block."""
        check_part(self, block, offset, length)
        return bytes(self._data[block][offset : offset + length])

    def of_tokens(self, table: list[int] | tuple[int, ...], count: int) -> bytes:
        """The KV of the first ``count`` tokens of a sequence with this block table."""
        whole = b"".join(bytes(self._data[block]) for block in table)
        return whole[: count * TOKEN_BYTES]

    def put_tokens(self, table: tuple[int, ...], start: int, kv: bytes) -> None:
        """Place the KV of tokens ``start …``."""
        for index in range(len(kv) // TOKEN_BYTES):
            block, slot = divmod(start + index, BLOCK_SIZE)
            at = slot * TOKEN_BYTES
            piece = kv[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
            self._data[table[block]][at : at + TOKEN_BYTES] = piece
