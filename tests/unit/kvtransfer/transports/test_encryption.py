"""kvtransfer/transports/encryption.py: nonces, places, and those who change bytes."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, ChecksumMismatch, HandoffError
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports import encryption
from kvtransfer.transports.encryption import (
    KEY_BYTES,
    NONCE_BYTES,
    Decryptor,
    Encryptor,
    new_key,
    read_key,
    wire_bytes,
)
from kvtransfer.transports.process_group.link import BUFFERS, GroupReceiveLink, GroupSendLink
from kvtransfer.transports.process_group.transport import GroupTransport
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer
from tests.support.kvtransfer.array_memory import ArrayMemory

BLOCKS, BLOCK_BYTES = 4, 256
DEADLINE_S = 60.0
KEY = bytes(range(16))
PARTS = Parts((3, 1), 64, 128)
BATCH = AnnouncedBatch(7, PARTS, replace(PARTS, blocks=(0, 2)), ())


def encrypted(key: bytes = KEY, number: int = 7, parts: Parts = PARTS) -> list[bytearray]:
    """The parts of a batch on the wire."""
    outs = [bytearray(wire_bytes(parts.length)) for _ in parts.blocks]
    memory = ArrayMemory(BLOCKS, BLOCK_BYTES, seed=1)
    Encryptor(key).encrypt(memory, number, parts, 0, [memoryview(out) for out in outs])
    return outs


def is_refused(data: bytes | bytearray, index: int = 0, batch: AnnouncedBatch = BATCH) -> bool:
    memory = HostMemory(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    try:
        Decryptor(KEY).decrypt(memory, batch, index, memoryview(data))
    except ChecksumMismatch:
        return True
    return False


def test_parts_arrive_at_their_places_and_nowhere_else() -> None:
    source = ArrayMemory(BLOCKS, BLOCK_BYTES, seed=1).array
    target = HostMemory(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    for index, part in enumerate(encrypted()):
        Decryptor(KEY).decrypt(target, BATCH, index, memoryview(part))
    expected = np.zeros_like(source)
    expected[[0, 2], 64:192] = source[[3, 1], 64:192]
    assert np.array_equal(target.data.reshape(BLOCKS, BLOCK_BYTES), expected)


def test_on_the_wire_it_is_aes_gcm() -> None:
    """Nonce, ciphertext and tag, as SP 800-38D has them; so both ends may be replaced one by
    one."""
    source = ArrayMemory(BLOCKS, BLOCK_BYTES, seed=1).array
    for index, part in enumerate(encrypted()):
        assert part[:NONCE_BYTES] == index.to_bytes(12, "big")
        place = b"".join(
            (
                (7).to_bytes(8, "little"),
                index.to_bytes(4, "little"),
                PARTS.blocks[index].to_bytes(8, "little"),
                (64).to_bytes(8, "little"),
            )
        )
        data = AESGCM(KEY).decrypt(bytes(part[:12]), bytes(part[12:]), place)
        assert data == source[PARTS.blocks[index], 64:192].tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 * wire_bytes(128) - 1))
def test_every_flipped_bit_is_found(bit: int) -> None:
    part = encrypted()[0]
    assert not is_refused(part)
    part[bit // 8] ^= 1 << bit % 8
    assert is_refused(part)


@pytest.mark.parametrize("kept", [0, 12, 28, wire_bytes(128) - 1])
def test_a_truncated_part_is_found(kept: int) -> None:
    part = encrypted()[0]
    assert is_refused(part[:kept] + bytes(len(part) - kept))


def test_a_part_passes_at_its_own_place_only() -> None:
    first, second = encrypted()
    assert not is_refused(first, 0)
    assert not is_refused(second, 1)
    assert is_refused(first, 1), "of another index"
    assert is_refused(first, batch=replace(BATCH, number=8)), "of another batch"
    for source in (replace(PARTS, blocks=(2, 1)), replace(PARTS, offset=0)):
        assert is_refused(first, batch=replace(BATCH, source=source)), "of another block or offset"
    assert is_refused(encrypted(bytes(16))[0]), "of another pair"


def test_a_refused_part_ends_as_a_wrong_checksum_does() -> None:
    memory = HostMemory(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(ChecksumMismatch, match="batch 7 arrived damaged"):
        Decryptor(bytes(16)).decrypt(memory, BATCH, 0, memoryview(encrypted()[0]))


def test_keys_are_read_and_not_shown() -> None:
    key = new_key()
    assert read_key(key.hex()) == key
    assert len({new_key() for _ in range(100)} | {key}) == 101
    for wrong in ("", key.hex()[2:], key.hex() + "00", "x" * 2 * KEY_BYTES):
        with pytest.raises(HandoffError, match="no key of 16 bytes") as caught:
            read_key(wrong)
        assert not wrong or wrong not in str(caught.value)


# No nonce twice under a key


@dataclass
class Nonces:
    """Every use of a key, in all links of this process."""

    used: dict[bytes, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def check(self) -> None:
        for nonces in self.used.values():
            assert len(set(nonces)) == len(nonces), "a nonce was used twice under a key"

    @property
    def count(self) -> int:
        return sum(len(nonces) for nonces in self.used.values())


def watch(patch: pytest.MonkeyPatch) -> Nonces:
    """See every use of a key from now on."""
    found = Nonces()

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, AESGCM(key)

        def encrypt_into(
            self, nonce: bytes, data: memoryview, place: bytes, out: memoryview
        ) -> int:
            found.used[self._key].append(bytes(nonce))
            return self._cipher.encrypt_into(nonce, data, place, out)

        def decrypt_into(
            self, nonce: bytes, data: memoryview, place: bytes, out: memoryview
        ) -> int:
            return self._cipher.decrypt_into(nonce, data, place, out)

    patch.setattr(encryption, "AESGCM", Watched)
    return found


def test_threads_never_share_a_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transfer threads and a mover encrypt for one link."""
    nonces = watch(monkeypatch)
    encryptor, memory = Encryptor(KEY), ArrayMemory(BLOCKS, BLOCK_BYTES, seed=1)
    start = threading.Barrier(3)

    def work() -> None:
        outs = [memoryview(bytearray(wire_bytes(128))) for _ in PARTS.blocks]
        start.wait(DEADLINE_S)
        for number in range(200):
            encryptor.encrypt(memory, number, PARTS, 0, outs)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    nonces.check()
    assert nonces.count == 3 * 200 * len(PARTS.blocks)


Action = tuple[str, int, int]
"""What happens, at which link, and to how many blocks."""
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["move", "move", "pack again", "forget", "reopen", "restart"]),
        st.integers(0, 3),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=12,
)


class Workers:
    """Two workers of two ranks; each rank of one sends to the same rank of the other, both
    ways."""

    def __init__(self, world: ExitStack) -> None:
        self._world = world
        self.ranks = [self._start() for _ in range(4)]
        self._numbers = itertools.count()
        self._directions = [(0, 2), (2, 0), (1, 3), (3, 1)]
        self._links = [self._link(*each) for each in self._directions]

    def _start(self) -> GroupTransport:
        made = GroupTransport("gloo", staging_bytes=BUFFERS * 4 * wire_bytes(BLOCK_BYTES))
        made.register(ArrayMemory(16, BLOCK_BYTES, seed=1))
        self._world.callback(made.close)
        return made

    def _link(self, writer: int, receiver: int) -> tuple[GroupSendLink, GroupReceiveLink]:
        peer = Peer("peer", "", writer % 2)
        receive, answer = self.ranks[receiver].accept(peer, self.ranks[writer].offer())
        return self.ranks[writer].connect(peer, answer), receive

    def do(self, action: Action) -> None:
        what, at, count = action
        send, receive = self._links[at]
        parts, number = Parts(tuple(range(count)), 0, BLOCK_BYTES), next(self._numbers)
        packed = send.pack(number, parts)
        if what == "forget":  # its ticket has ended
            return
        if what == "pack again":  # as a caller would that tries once more
            packed = send.pack(number, parts)
        batch = AnnouncedBatch(number, parts, parts, ())
        landed = receive.receive(batch, DEADLINE_S)
        sent = send.send(number, packed, DEADLINE_S)
        if what in ("reopen", "restart"):
            # The same blocks are sent again, by a new pair.
            if what == "restart":
                writer = self._directions[at][0]
                self.ranks[writer].close()
                self.ranks[writer] = self._start()
                for other, direction in enumerate(self._directions):
                    if writer in direction:
                        self._links[other] = self._link(*direction)
            else:
                send.close()
                self._links[at] = self._link(*self._directions[at])
            with suppress(BatonError):
                sent.wait(DEADLINE_S)
            receive.close()
            self.do(("move", at, count))
            return
        for transfer in (landed, sent):
            transfer.wait(DEADLINE_S)


@settings(max_examples=10, deadline=None)
@given(ACTIONS)
def test_no_link_uses_a_nonce_twice(actions: list[Action]) -> None:
    """Several parts, ranks and pairs, both directions, batches that are packed again, and pairs
    and workers that begin again."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as world:
        found = watch(patch)
        workers = Workers(world)
        for action in actions:
            workers.do(action)
        found.check()
        # What is forgotten may not have been encrypted yet.
        assert found.count >= sum(what != "forget" for what, _, _ in actions)
