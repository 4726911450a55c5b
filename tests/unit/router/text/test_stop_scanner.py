"""Stop strings, however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_scanner import StopScanner

LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def scan(pieces: list[str], stop: list[str]) -> tuple[str, str]:
    scanner = StopScanner(stop)
    shown = "".join(scanner.feed(piece) for piece in pieces)
    return shown + ("" if scanner.found else scanner.rest()), scanner.match


def expected(text: str, stop: list[str]) -> tuple[str, str]:
    """Read character by character; stop as soon as a stop string is complete: which one."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(st.lists(LETTERS, max_size=6), STOPS)
def test_pieces_make_no_difference(pieces: list[str], stop: list[str]) -> None:
    assert scan(pieces, stop) == expected("".join(pieces), stop)


@given(LETTERS, STOPS)
def test_only_a_possible_beginning_is_held_back(text: str, stop: list[str]) -> None:
    scanner = StopScanner(stop)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += scanner.feed(character)
        if scanner.found:
            return
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("some text E") == "some text "
    assert scanner.feed("x") == "Ex"


def test_nothing_after_the_stop() -> None:
    scanner = StopScanner(["."])
    assert scanner.feed("a. b") == "a"
    assert scanner.feed("more") == ""
    assert scanner.rest() == ""
