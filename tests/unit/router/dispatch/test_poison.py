"""Which requests are taken to kill workers, and for how long they are kept out."""

from __future__ import annotations

from router.dispatch import poison
from router.dispatch.poison import PROGRESS_TOKENS, FailedWorkers, Quarantine, prompt_hash


def failed(*places: tuple[str, int]) -> FailedWorkers:
    """Workers that say that they failed, each when the answer had that number of tokens."""
    found = FailedWorkers()
    for worker, place in places:
        found.note(worker, place, proved=True)
    return found


def test_two_workers_at_one_place_are_no_chance() -> None:
    assert not failed(("a", 5)).are_proof
    assert not failed(("a", 5), ("a", 5)).are_proof, "it is the same worker"
    assert failed(("a", 5), ("b", 5 + PROGRESS_TOKENS - 1)).are_proof


def test_who_goes_on_after_its_move_was_merely_there() -> None:
    places = [(f"worker-{number}", number * PROGRESS_TOKENS) for number in range(5)]
    assert not failed(*places).are_proof
    assert failed(*places, ("another", 4 * PROGRESS_TOKENS + 1)).are_proof


def test_a_lost_worker_is_evidence_once_it_is_dead() -> None:
    found = failed(("a", 5))
    found.note("b", 5, proved=False)
    assert found.may_be_proof
    found.learn(lambda worker: None)
    assert found.may_be_proof
    assert not found.are_proof
    found.learn(lambda worker: True)
    assert found.are_proof


def test_a_worker_that_speaks_again_is_none() -> None:
    found = failed(("a", 5))
    found.note("b", 5, proved=False)
    found.learn(lambda worker: False)
    assert not found.may_be_proof
    found.note("a", 5, proved=False)
    found.learn(lambda worker: False)
    found.note("b", 5, proved=True)
    assert found.are_proof, "what a worker has said of itself stays"


def test_a_prompt_is_kept_out_for_a_while() -> None:
    quarantine = Quarantine(60.0)
    one, other = prompt_hash((1, 2, 3), b""), prompt_hash((1, 2), b"")
    assert not quarantine
    quarantine.add(one, 100.0)
    assert quarantine
    assert quarantine.left_s(one, 130.0) == 30.0
    assert quarantine.left_s(other, 130.0) == 0.0
    quarantine.add(one, 140.0)
    assert quarantine.left_s(one, 170.0) == 30.0
    assert quarantine.left_s(one, 200.0) == 0.0
    assert not quarantine


def test_tenants_are_not_kept_out_for_each_other() -> None:
    assert prompt_hash((1, 2, 3), b"one") != prompt_hash((1, 2, 3), b"two")


def test_it_does_not_grow_for_ever(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(poison, "_MOST", 2)
    quarantine = Quarantine(60.0)
    for number in range(3):
        quarantine.add(bytes([number]), float(number))
    assert [quarantine.left_s(bytes([n]), 3.0) > 0 for n in range(3)] == [False, True, True]
