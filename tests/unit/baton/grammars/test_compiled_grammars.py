"""The cache of compiled grammars, over a compiler that counts."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, TokenMatcher, reason_in
from baton.grammars.compiled_grammars import CompiledGrammars, grammars_of
from tests.support.baton.grammar_tools import regex, small_grammars, vocab_size

WAIT_S = 20.0


class CountingCompiler:
    """Compiles with the library, when it is let; counts by text."""

    def __init__(self) -> None:
        self.loads = 0
        self.compiled: Counter[str] = Counter()
        self.may_go = threading.Event()
        self.may_go.set()
        self.all_began = threading.Semaphore(0)

    def load(self) -> CountingCompiler:
        self.loads += 1
        return self

    def __call__(self, grammar: Grammar) -> TokenMatcher:
        self.compiled[grammar.text] += 1
        self.all_began.release()
        assert self.may_go.wait(WAIT_S)
        if grammar.text == "bad":
            raise InvalidGrammar("it is bad")
        return small_grammars().matcher(grammar)


@pytest.fixture
def compiler() -> CountingCompiler:
    return CountingCompiler()


def test_each_is_compiled_once(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size())
    assert compiler.loads == 0
    assert grammars.kept(regex("a")) is None
    first, second = grammars.matcher(regex("a")), grammars.matcher(regex("a"))
    assert first is not second
    assert compiler.compiled == {"a": 1}
    assert compiler.loads == 1
    assert grammars.kept(regex("a")) is not None


def test_a_library_that_cannot_be_loaded_fails_each_grammar() -> None:
    def load() -> CountingCompiler:
        raise InvalidGrammar("no memory")

    grammars = CompiledGrammars[TokenMatcher](load, vocab_size())
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="no memory"):
            grammars.matcher(regex("a"))


def test_matchers_of_one_grammar_do_not_disturb_each_other(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size())
    broken, sound = grammars.matcher(regex("a")), grammars.matcher(regex("a"))
    assert not broken.consume_token(0)
    assert broken.is_error()
    assert not sound.is_error()
    assert not grammars.matcher(regex("a")).is_error()


def test_the_longest_unused_goes_first(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size(), max_grammars=2)
    for text in ("a", "b", "a", "c"):
        grammars.matcher(regex(text))
    assert [grammars.kept(regex(text)) is not None for text in "abc"] == [True, False, True]
    grammars.matcher(regex("b"))
    assert compiler.compiled == {"a": 1, "b": 2, "c": 1}


def test_texts_are_bounded_in_bytes(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size(), max_bytes=10)
    for text in ("aaaa", "bbbb", "cccc"):
        grammars.matcher(regex(text))
    assert [grammars.kept(regex(text * 4)) is not None for text in "abc"] == [False, True, True]
    grammars.matcher(regex("d" * 30))
    assert [grammars.kept(regex(text * 4)) is not None for text in "bc"] == [False, False]
    assert grammars.kept(regex("d" * 30)) is not None


def test_tenants_share_no_grammar_and_the_largest_share_gives_way(
    compiler: CountingCompiler,
) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size(), max_grammars=4)
    grammars.matcher(regex("a"), b"small")
    for text in ("a", "b", "c", "d", "e"):
        grammars.matcher(regex(text), b"large")
    assert compiler.compiled["a"] == 2
    assert grammars.kept(regex("a"), b"small") is not None
    kept = [grammars.kept(regex(text), b"large") is not None for text in "abcde"]
    assert kept == [False, False, True, True, True]


def test_what_is_refused_is_not_kept(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size())
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="it is bad"):
            grammars.matcher(regex("bad"))
    assert compiler.compiled == {"bad": 2}


def test_threads_wait_for_their_own_grammars_alone(compiler: CountingCompiler) -> None:
    grammars = CompiledGrammars(compiler.load, vocab_size())
    compiler.may_go.clear()
    threads = [
        threading.Thread(target=grammars.matcher, args=[regex(text)]) for text in ("a", "b", "a")
    ]
    for thread in threads:
        thread.start()
    assert compiler.all_began.acquire(timeout=WAIT_S)
    assert compiler.all_began.acquire(timeout=WAIT_S)
    assert compiler.all_began.acquire(timeout=WAIT_S)
    compiler.may_go.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert grammars.kept(regex("a")) is not None
    assert grammars.kept(regex("b")) is not None
    assert compiler.loads == 1


def test_a_tokenizer_that_is_not_there() -> None:
    def missing() -> str:
        raise FileNotFoundError("no tokenizer.json")

    with pytest.raises(InvalidGrammar, match=r"no tokenizer\.json"):
        grammars_of(missing, 8, [1]).matcher(regex("a"))


def test_reasons_are_one_line() -> None:
    assert reason_in("first\n   second\n<non-verbose/>\nrest") == "first second"
    assert reason_in("NoExtensionBias\n<non-verbose/>") == "no text matches it"
    assert len(reason_in("x" * 1000)) == 301
    assert reason_in("") == "the library gives no reason"
