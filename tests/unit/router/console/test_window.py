from __future__ import annotations

from router.console.window import Window

SENT, LOST = ("sent",), ("lost",)


def test_what_has_grown_in_a_span() -> None:
    window = Window(60)
    assert window.growth(10) == (0.0, {})
    window.add(100, {SENT: 5})
    assert window.growth(10) == (0.0, {})
    for second in range(1, 31):
        window.add(100 + second, {SENT: 5 + 2 * second})
    assert window.growth(10) == (10.0, {SENT: 20})
    assert window.growth(0) == (1.0, {SENT: 2})
    assert window.growth(1000) == (30.0, {SENT: 60})


def test_what_is_older_than_the_span_goes() -> None:
    window = Window(10)
    for second in range(100):
        window.add(second, {SENT: second})
    assert window.growth(1000) == (10.0, {SENT: 10})
    window.clear()
    assert window.growth(1000) == (0.0, {})


def test_one_that_begins_anew_counts_from_nothing() -> None:
    window = Window(60)
    window.add(0, {SENT: 500})
    window.add(1, {SENT: 7, LOST: 2})
    assert window.growth(60) == (1.0, {SENT: 7, LOST: 2})


def test_a_pause_between_looks_is_counted_as_it_was() -> None:
    window = Window(10)
    window.add(0, {SENT: 0})
    window.add(50, {SENT: 100})
    assert window.growth(10) == (50.0, {SENT: 100})
