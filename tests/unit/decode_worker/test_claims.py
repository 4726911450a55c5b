"""Who comes first where there is no room."""

from __future__ import annotations

from decode_worker.claims import CLAIM_S, Claims

ONE, OTHER, NEW = ("one", 1), ("other", 2), ("new", 0)


def test_claims_are_served_in_their_order() -> None:
    claims = Claims()
    assert claims.may_go(NEW, 0.0)
    claims.make(ONE, 0.0)
    claims.make(OTHER, 0.1)
    claims.make(ONE, 0.2)
    assert [claims.may_go(each, 0.3) for each in (ONE, OTHER, NEW)] == [True, False, False]
    claims.drop(ONE)
    claims.drop(ONE)
    assert [claims.may_go(each, 0.3) for each in (OTHER, NEW)] == [True, False]


def test_a_claim_that_is_not_renewed_lapses() -> None:
    claims = Claims()
    claims.make(ONE, 0.0)
    assert not claims.may_go(NEW, CLAIM_S / 2)
    assert claims.may_go(NEW, CLAIM_S)
