"""The retention book against its promises, under any order of calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.retention import RetentionBook, RetentionShare

TENANTS = ("acme", "rival")
SHARE = RetentionShare(of_tenant=6, total=9)


def chain(tenant: str, name: str, length: int) -> list[bytes]:
    """Hashes of a prompt's leading blocks; no two tenants have one in common."""
    return [f"{tenant}-{name}{index}".encode() for index in range(length)]


class RetentionMachine(RuleBasedStateMachine):
    """Pins of both tenants, and claims without a name."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(4)
        self.book = RetentionBook(self.pool)
        self.pins: dict[tuple[str, str], tuple[list[bytes], float]] = {}
        self.now = 0.0

    def covered(self, tenant: str) -> set[bytes]:
        return {one for one in self.pool.retained if one.startswith(tenant.encode())}

    @rule(
        tenant=st.sampled_from(TENANTS),
        name=st.sampled_from("ab"),
        length=st.integers(1, 8),
        ttl_s=st.integers(1, 5),
    )
    def pin(self, tenant: str, name: str, length: int, ttl_s: int) -> None:
        hashes = chain(tenant, name, length)
        others = {one: self.covered(one) for one in TENANTS if one != tenant}
        before = set(self.pool.retained)
        pinned = self.book.pinned(tenant)
        key, until = (tenant, f"{name}{length}"), self.now + ttl_s
        count = self.book.claim(tenant, hashes, until, SHARE, name=key[1])
        assert count in (0, length), "a pin is whole or not there"
        assert {one: self.covered(one) for one in others} == others
        if count:
            assert set(hashes) <= self.pool.retained
            old = self.pins.get(key)
            self.pins[key] = hashes, max(until, old[1] if old else 0.0)
        else:
            assert self.pool.retained == before
            assert pinned + length > SHARE.of_tenant or len(before) + length > SHARE.total

    @rule(
        tenant=st.sampled_from(TENANTS),
        name=st.sampled_from("abc"),
        length=st.integers(1, 8),
        ttl_s=st.integers(1, 5),
    )
    def keep(self, tenant: str, name: str, length: int, ttl_s: int) -> None:
        hashes = chain(tenant, name, length)
        others = {one: self.covered(one) for one in TENANTS if one != tenant}
        count = self.book.claim(tenant, hashes, self.now + ttl_s, SHARE)
        assert set(hashes[:count]) <= self.pool.retained
        assert {one: self.covered(one) for one in others} == others

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from("ab"), length=st.integers(1, 8))
    def unpin(self, tenant: str, name: str, length: int) -> None:
        was_there = self.pins.pop((tenant, f"{name}{length}"), None) is not None
        assert self.book.end(tenant, f"{name}{length}") is was_there

    @rule(seconds=st.integers(0, 3))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.book.expire(self.now)
        self.pins = {key: pin for key, pin in self.pins.items() if pin[1] > self.now}

    @invariant()
    def keeps_its_promises(self) -> None:
        self.book.check()
        for hashes, _ in self.pins.values():
            assert set(hashes) <= self.pool.retained, "a pin was lost"
        assert self.book.total <= SHARE.total
        pinned_hashes = {digest for hashes, _ in self.pins.values() for digest in hashes}
        assert self.book.total_pinned == len(pinned_hashes)
        for tenant in TENANTS:
            assert len(self.covered(tenant)) <= SHARE.of_tenant
            pinned = [
                set(hashes) for (owner, _), (hashes, _) in self.pins.items() if owner == tenant
            ]
            assert self.book.pinned(tenant) == len(set().union(*pinned))

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.book.expire(self.now + 10)
            self.book.check()
            assert not self.pool.retained, "something outlives its time"


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


def test_a_claim_without_a_name_keeps_what_has_room_and_gives_way_to_a_newer_one() -> None:
    book = RetentionBook(pool := BlockPool(4))
    assert book.claim("t", chain("t", "a", 8), 10.0, SHARE) == 6
    assert pool.retained == set(chain("t", "a", 6))
    assert book.claim("t", chain("t", "b", 2), 10.0, SHARE) == 2
    assert pool.retained == set(chain("t", "b", 2))


def test_a_pin_takes_the_place_of_claims_without_a_name_and_never_of_a_pin() -> None:
    book = RetentionBook(pool := BlockPool(4))
    book.claim("t", chain("t", "a", 4), 10.0, SHARE)
    assert book.claim("t", chain("t", "b", 5), 10.0, SHARE, name="b") == 5
    assert pool.retained == set(chain("t", "b", 5))
    assert book.claim("t", chain("t", "c", 2), 10.0, SHARE, name="c") == 0
    assert book.claim("t", chain("t", "d", 3), 10.0, SHARE) == 1
    assert set(chain("t", "b", 5)) < pool.retained


def test_of_a_conversation_that_grows_one_claim_is_left() -> None:
    """Each turn asks for its whole prompt: the earlier turns' claims are part of the latest."""
    book = RetentionBook(pool := BlockPool(4))
    for length in range(1, 6):
        book.claim("t", chain("t", "a", length), 10.0 + length, SHARE)
    assert len(book._claims) == 1
    book.expire(15.0)
    assert not pool.retained
