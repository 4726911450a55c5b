from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.faults.faults import FAULTS
from tests.chaos.faults.kinds import BY_NAME, KINDS, LAUNCHER_KINDS, MODEL_KINDS, away_for
from tests.chaos.run import min_rounds
from tests.chaos.schedule import Round, rounds, rounds_until_all

SEEDS = st.integers(min_value=0, max_value=1 << 32)


def first(seed: int, count: int = 4 * len(KINDS)) -> list[Round]:
    return list(itertools.islice(rounds(seed, KINDS), count))


@given(SEEDS)
def test_a_seed_is_a_schedule(seed: int) -> None:
    assert first(seed) == first(seed)


def test_other_seeds_are_other_schedules() -> None:
    assert len({tuple(first(seed, 5)) for seed in range(20)}) == 20


@given(SEEDS)
def test_every_kind_comes_before_any_comes_again(seed: int) -> None:
    names = [strike.kind.name for one in first(seed) for strike in one.strikes]
    decks = [set(names[at : at + len(KINDS)]) for at in range(0, len(names), len(KINDS))]
    assert decks[0] == decks[1] == {kind.name for kind in KINDS}


@given(SEEDS)
def test_every_kind_has_come_by_the_stated_round(seed: int) -> None:
    count = rounds_until_all(seed, KINDS)

    def kinds(rounds_of_it: int) -> set[str]:
        return {strike.kind.name for one in first(seed, rounds_of_it) for strike in one.strikes}

    assert kinds(count) == {kind.name for kind in KINDS} != kinds(count - 1)


@given(SEEDS)
def test_faults_at_once_are_of_several_targets_and_last_as_long_as_they_may(seed: int) -> None:
    for one in first(seed):
        targets = [strike.kind.target for strike in one.strikes]
        assert 1 <= len(targets) == len(set(targets)) <= 2
        for strike in one.strikes:
            assert strike.kind.min_s <= strike.seconds <= strike.kind.max_s


@given(SEEDS)
def test_a_standstill_comes_alone(seed: int) -> None:
    for one in first(seed):
        if any(strike.kind.is_standstill for strike in one.strikes):
            assert len(one.strikes) == 1


def test_standstills_are_long_now_and_then_and_leave_the_run_its_time() -> None:
    found: dict[str, list[float]] = {}
    for strike in itertools.chain.from_iterable(one.strikes for one in first(5, 4000)):
        if strike.kind.is_standstill:
            found.setdefault(strike.kind.name, []).append(strike.seconds)
    assert found.keys() == {"router stopped", "host stopped"}
    for name, seconds in found.items():
        longest = BY_NAME[name].max_s
        assert min(seconds) < 4.0
        assert max(seconds) > 0.8 * longest
        assert sum(seconds) / len(seconds) < longest / 2


def test_most_rounds_have_one_fault() -> None:
    counts = [len(one.strikes) for one in first(3, 400)]
    assert 0.7 < counts.count(1) / len(counts) < 0.9


def test_every_kind_has_its_fault() -> None:
    assert set(FAULTS) == set(BY_NAME)


@given(SEEDS)
def test_launchers_are_away_once_at_a_time(seed: int) -> None:
    found = itertools.islice(rounds(seed, (*KINDS, *LAUNCHER_KINDS)), 100)
    counts = [sum(strike.kind.needs_launchers for strike in one.strikes) for one in found]
    assert set(counts) == {0, 1}


@given(SEEDS)
def test_launchers_are_away_for_as_long_as_is_asked(seed: int) -> None:
    kinds = [away_for(kind, 600.0) for kind in (*KINDS, *LAUNCHER_KINDS)]
    for strike in (
        one for each in itertools.islice(rounds(seed, kinds), 60) for one in each.strikes
    ):
        assert (strike.seconds == 600.0) is strike.kind.needs_launchers


def test_longer_rounds_may_be_fewer() -> None:
    assert min_rounds(3.0, KINDS) == 9
    assert min_rounds(3.0, LAUNCHER_KINDS) == 3
    assert min_rounds(15.0, MODEL_KINDS) == 6
    assert min_rounds(3.0, [away_for(kind, 600.0) for kind in LAUNCHER_KINDS]) == 1
