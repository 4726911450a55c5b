"""Blocks read as another worker has them: the converter's bytes, in whatever parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry
from engine.kv.kv_cache import KvCache
from kvtransfer.layout.layout import KvLayout
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import BlockMemory
from tests.support.models import plain_config
from worker.conversion.converted_blocks import ConvertedBlocks, Staging
from worker.conversion.kv_converter import Converter

TOKENS = 50
TABLE = [3, 0, 5, 1]
TARGET = Geometry(32, 2, 2, 8, "int8")
CONFIG = plain_config(layers=2, heads=2, kv_heads=2, head_dim=8)


def make_cache() -> KvCache:
    cache = KvCache(CONFIG, 7, 16, torch.bfloat16, torch.device("cpu"))
    numbers = torch.Generator().manual_seed(0)
    cache.data.copy_(torch.randn(cache.data.shape, generator=numbers))
    return cache


@pytest.fixture
def cache() -> KvCache:
    return make_cache()


def make_blocks(
    cache: KvCache, staging: Staging, target: Geometry = TARGET, tokens: int = TOKENS
) -> ConvertedBlocks:
    blocks = ConvertedBlocks(cache, target, staging)
    blocks.computed(TABLE, tokens)
    return blocks


def expected(cache: KvCache, target: Geometry = TARGET) -> list[bytes]:
    layout = KvLayout.of(target)
    wanted = range(-(-TOKENS // layout.block_size))
    out = torch.empty((len(wanted), layout.block_bytes), dtype=torch.uint8)
    converter = Converter(KvLayout.of(cache.geometry), layout)
    converter.convert(cache.bytes, TABLE, TOKENS, wanted, out)
    return [row.numpy().tobytes() for row in out]


def read(memory: BlockMemory, block: int, offset: int, length: int) -> bytes:
    out = bytearray(length)
    digest = memory.read(block, offset, memoryview(out))
    assert digest == checksum(bytes(out))
    return bytes(out)


TARGETS = [TARGET, replace(TARGET, kv_dtype="fp8", block_size=16), Geometry(8, 2, 2, 8, "float32")]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_whole_blocks_the_last_of_them_partial(cache: KvCache, target: Geometry) -> None:
    staging = Staging(1 << 20)
    blocks = make_blocks(cache, staging, target)
    wanted = expected(cache, target)
    assert (blocks.blocks, blocks.block_bytes) == (len(wanted), len(wanted[0]))
    for block, data in enumerate(wanted):
        assert read(blocks, block, 0, len(data)) == data
        assert blocks.checksum(block, 0, len(data)) == checksum(data)
    assert blocks.shared_file is None
    assert staging.bytes == 0


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_parts_are_those_of_the_block_with_room_to_keep_it_and_without(
    cache: KvCache, room: int
) -> None:
    """The same part of every block first, as a pair sends them."""
    staging = Staging(room)
    blocks = make_blocks(cache, staging)
    wanted = expected(cache)
    size = blocks.block_bytes
    found = [b"", b""]
    for start, end in ((0, 192), (192, 320), (320, size)):
        for block in range(2):
            found[block] += read(blocks, block, start, end - start)
            assert staging.bytes <= max(room, size)
    assert found == wanted
    assert staging.bytes == 0


def test_a_block_of_several_parts_is_converted_once(
    cache: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(cache, Staging(1 << 20))
    wanted = expected(cache)[0]
    calls = []
    convert = Converter.convert

    def counted(self: Converter, *arguments: object) -> None:
        calls.append(arguments)
        convert(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Converter, "convert", counted)
    parts = [read(blocks, 0, start, 64) for start in range(0, len(wanted), 64)]
    assert b"".join(parts) == wanted
    assert len(calls) == 1


def test_more_tokens_come(cache: KvCache) -> None:
    """What is complete can be read before the rest is computed."""
    blocks = make_blocks(cache, Staging(0), tokens=40)
    early = read(blocks, 0, 0, blocks.block_bytes)
    blocks.computed(TABLE, TOKENS)
    assert early == expected(cache)[0]
    assert read(blocks, 1, 0, blocks.block_bytes) == expected(cache)[1]


def test_what_is_closed_keeps_nothing(cache: KvCache) -> None:
    """Nor does a read that a closing overtakes; others are left alone."""
    staging = Staging(1 << 20)
    one, other = make_blocks(cache, staging), make_blocks(cache, staging)
    read(one, 0, 0, 64)
    read(other, 1, 0, 64)
    assert staging.bytes == 2 * one.block_bytes
    one.close()
    one.close()
    assert staging.bytes == one.block_bytes
    read(one, 0, 0, 64)
    assert staging.bytes == one.block_bytes
    assert read(other, 1, 64, 64) == expected(cache)[1][64:128]


@pytest.mark.parametrize("part", [(2, 0, 64), (-1, 0, 64), (0, -1, 64), (0, 0, 1 << 20)])
def test_what_there_is_not(cache: KvCache, part: tuple[int, int, int]) -> None:
    blocks = make_blocks(cache, Staging(0))
    with pytest.raises(HandoffError, match="there are 2 blocks"):
        read(blocks, *part)


def test_nothing_is_there_before_it_is_computed(cache: KvCache) -> None:
    blocks = ConvertedBlocks(cache, TARGET, Staging(0))
    assert blocks.blocks == 0
    with pytest.raises(HandoffError, match="there are 0 blocks"):
        read(blocks, 0, 0, 64)


def test_they_lie_nowhere(cache: KvCache) -> None:
    with pytest.raises(HandoffError, match="no address"):
        _ = make_blocks(cache, Staging(0)).address


def test_they_are_only_read(cache: KvCache) -> None:
    with pytest.raises(HandoffError, match="cannot be written"):
        make_blocks(cache, Staging(0)).write(0, 0, memoryview(b"x" * 64))


@pytest.mark.parametrize("change", [{"head_dim": 16}, {"layers": 3}, {"tensor_parallel": 2}])
def test_a_receiver_that_cannot_be_served_is_named_with_this_side(
    cache: KvCache, change: dict[str, int]
) -> None:
    target = replace(TARGET, **change)  # type: ignore[arg-type]
    with pytest.raises(GeometryMismatch) as refusal:
        ConvertedBlocks(cache, target, Staging(0))
    (name,) = change
    assert f"{name}={change[name]}" in refusal.value.message
    assert f"{name}={getattr(cache.geometry, name)}" in refusal.value.message
