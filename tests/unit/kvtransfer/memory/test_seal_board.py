"""Checksums on a board are found by the batch that they belong to, and by no other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer.memory.seal_board import BOARD_BYTES, Seal, SealBoard, read_seal

START = 64
MAX_CHECKSUMS = 2047
REGIONS = 64
SUMS = (3, (1 << 64) - 1, 5)


@pytest.fixture
def file() -> npt.NDArray[np.uint8]:
    """A shared file with some blocks before its board."""
    return np.zeros(START + BOARD_BYTES, dtype=np.uint8)


@pytest.fixture
def board(file: npt.NDArray[np.uint8]) -> SealBoard:
    return SealBoard(file[START:].view(np.uint64), START)


def taken(board: SealBoard, count: int = len(SUMS)) -> Seal:
    seal = board.take(count)
    assert seal is not None
    return seal


def test_what_is_published_is_found(file: npt.NDArray[np.uint8], board: SealBoard) -> None:
    seals = [taken(board) for _ in range(REGIONS)]
    for number, seal in enumerate(seals):
        assert read_seal(file, seal.at, seal.mark, len(SUMS)) is None
        seal.publish([number, *SUMS[1:]])
    for number, seal in enumerate(seals):
        assert read_seal(file, seal.at, seal.mark, len(SUMS)) == (number, *SUMS[1:])
    assert not file[:START].any()


def test_the_largest_batch_fits(file: npt.NDArray[np.uint8], board: SealBoard) -> None:
    assert board.take(MAX_CHECKSUMS + 1) is None
    seals = [taken(board, MAX_CHECKSUMS) for _ in range(2)]
    for number, seal in enumerate(seals):
        seal.publish(range(number, number + MAX_CHECKSUMS))
    for number, seal in enumerate(seals):
        found = read_seal(file, seal.at, seal.mark, MAX_CHECKSUMS)
        assert found == tuple(range(number, number + MAX_CHECKSUMS))


def test_half_written_or_foreign_checksums_are_not_taken(
    file: npt.NDArray[np.uint8], board: SealBoard
) -> None:
    seal = taken(board)
    seal.publish(SUMS)
    assert read_seal(file, seal.at, seal.mark ^ 1, len(SUMS)) is None
    assert read_seal(file, seal.at, seal.mark, len(SUMS) - 1) is None
    assert read_seal(file, seal.at + 8, seal.mark, len(SUMS)) is None
    for word in range(1 + len(SUMS)):
        seal.words[word] ^= np.uint64(1 << 40)
        assert read_seal(file, seal.at, seal.mark, len(SUMS)) is None
        seal.words[word] ^= np.uint64(1 << 40)
    assert read_seal(file, seal.at, seal.mark, len(SUMS)) == SUMS


def test_a_region_is_used_again_under_another_mark(
    file: npt.NDArray[np.uint8], board: SealBoard
) -> None:
    seals = [taken(board) for _ in range(REGIONS)]
    assert board.take(1) is None
    seals[7].publish(SUMS)
    board.give_back(seals[7])
    again = taken(board)
    assert again.at == seals[7].at
    assert read_seal(file, again.at, again.mark, len(SUMS)) is None
    again.publish(SUMS[::-1])
    assert read_seal(file, seals[7].at, seals[7].mark, len(SUMS)) is None
    assert read_seal(file, again.at, again.mark, len(SUMS)) == SUMS[::-1]


@pytest.mark.parametrize("at", [START + BOARD_BYTES, START + BOARD_BYTES - 8, 1 << 62, START + 1])
def test_a_place_outside_the_file_has_nothing(file: npt.NDArray[np.uint8], at: int) -> None:
    assert read_seal(file, at, 1, 1) is None
