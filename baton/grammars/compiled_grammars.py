"""The grammars that a process has compiled: the latest are kept, bounded in number and in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, TokenMatcher, reason_in

Compile = Callable[[Grammar], TokenMatcher]
"""Raises InvalidGrammar."""


class CompiledGrammars:
    """Any thread may call it: one grammar compiles at a time, and only its callers wait."""

    def __init__(
        self,
        load: Callable[[], Compile],
        vocab_size: int,
        *,
        most: int = 64,
        max_bytes: int = 2 << 20,
    ) -> None:
        """``load`` is called for the first grammar. Masks are of ``vocab_size`` tokens. Kept are

        ``most`` grammars, whose texts have ``max_bytes`` in all; and always the latest.
        """
        self.vocab_size = vocab_size
        self._load = load
        self._most = most
        self._max_bytes = max_bytes
        self._compile: Compile | None = None
        self._kept: OrderedDict[Grammar, TokenMatcher] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def __contains__(self, grammar: Grammar) -> bool:
        """Whether it is kept."""
        return self._find(grammar) is not None

    def kept(self, grammar: Grammar) -> TokenMatcher | None:
        """A new matcher at the start of a text; None where the grammar is not kept."""
        found = self._find(grammar)
        return None if found is None else found.deep_copy()

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A new matcher, at the start of a text. Compiles a grammar that is not kept.

        Raises InvalidGrammar.
        """
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                # Another thread may have compiled it while this one waited.
                found = self._find(grammar) or self._compiled(grammar)
        return found.deep_copy()

    def _find(self, grammar: Grammar) -> TokenMatcher | None:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return found

    def _compiled(self, grammar: Grammar) -> TokenMatcher:
        if self._compile is None:
            self._compile = self._load()
        matcher = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = matcher
            self._bytes += len(grammar.text)
            while len(self._kept) > 1 and (
                len(self._kept) > self._most or self._bytes > self._max_bytes
            ):
                oldest, _ = self._kept.popitem(last=False)
                self._bytes -= len(oldest.text)
        return matcher


def grammars_of(
    tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]
) -> CompiledGrammars:
    """For answers in the tokens of one tokenizer; see ``baton.grammars.grammar_library``."""

    def load() -> Compile:
        try:
            # Here alone: the library and its tables take memory, and a machine may lack it.
            from baton.grammars.grammar_library import GrammarCompiler  # noqa: PLC0415

            return GrammarCompiler(tokenizer_json(), vocab_size, eos_ids).compile
        except (ImportError, OSError, ValueError) as error:
            raise InvalidGrammar(
                f"grammars are not possible with this model's tokenizer: {reason_in(str(error))}"
            ) from None

    return CompiledGrammars(load, vocab_size)
