"""Cache of the grammars that a process has compiled, bounded in number and in bytes.

Like the KV cache, it is separate for each cache salt, so a tenant cannot infer another tenant's
grammars from compile times. Evictions take from the salt that holds the most.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, TokenMatcher, reason_in

Compile = Callable[[Grammar], TokenMatcher]
"""Function that compiles a grammar. It raises InvalidGrammar."""


@dataclass(slots=True)
class _Share:
    """The compiled grammars of one cache salt, least recently used first."""

    kept: OrderedDict[Grammar, TokenMatcher] = field(default_factory=OrderedDict)
    size: int = 0
    """Size of the grammars' texts, in bytes."""


class CompiledGrammars:
    """Compiles and keeps grammars.

    Thread-safe: one grammar compiles at a time, and only its callers wait.
    """

    def __init__(
        self,
        load: Callable[[], Compile],
        vocab_size: int,
        *,
        max_grammars: int = 64,
        max_bytes: int = 2 << 20,
    ) -> None:
        """Create an empty cache. ``load`` returns the compiler. It is called by ``prepare``, or
        else for the first grammar.

        The token masks of matchers have ``vocab_size`` bits.

        The cache keeps up to ``max_grammars`` grammars, whose texts have up to ``max_bytes`` in
        all. It always keeps the latest grammar.
        """
        self.vocab_size = vocab_size
        self._load = load
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._compile: Compile | None = None
        self._shares: OrderedDict[bytes, _Share] = OrderedDict()
        """Compiled grammars by cache salt, least recently used salt first."""
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def prepare(self) -> None:
        """Load the grammar library, which holds the interpreter lock for 0.3 s or more.

        An error is raised when the first grammar is compiled.
        """
        with self._compiling:
            if self._compile is None:
                with contextlib.suppress(InvalidGrammar):
                    self._compile = self._load()

    def kept(self, grammar: Grammar, cache_salt: bytes = b"") -> TokenMatcher | None:
        """Return a new matcher of a grammar, at the start of a text, if the cache has the grammar;
        else None."""
        found = self._find(grammar, cache_salt)
        return None if found is None else found.deep_copy()

    def matcher(self, grammar: Grammar, cache_salt: bytes = b"") -> TokenMatcher:
        """Return a new matcher of a grammar, at the start of a text. If the cache does not have the
        grammar, compile it.

        Raises InvalidGrammar.
        """
        found = self._find(grammar, cache_salt)
        if found is None:
            with self._compiling:
                # Another thread may have compiled the grammar while this one waited.
                found = self._find(grammar, cache_salt) or self._compiled(grammar, cache_salt)
        return found.deep_copy()

    def _find(self, grammar: Grammar, cache_salt: bytes) -> TokenMatcher | None:
        with self._lock:
            share = self._shares.get(cache_salt)
            found = None if share is None else share.kept.get(grammar)
            if share is not None and found is not None:
                self._shares.move_to_end(cache_salt)
                share.kept.move_to_end(grammar)
            return found

    def _compiled(self, grammar: Grammar, cache_salt: bytes) -> TokenMatcher:
        if self._compile is None:
            self._compile = self._load()
        matcher = self._compile(grammar)
        with self._lock:
            while not self._fits(grammar):
                self._drop_oldest()
            share = self._shares.setdefault(cache_salt, _Share())
            self._shares.move_to_end(cache_salt)
            share.kept[grammar] = matcher
            share.size += len(grammar.text)
        return matcher

    def _fits(self, grammar: Grammar) -> bool:
        """Whether the cache has room for another grammar."""
        kept = sum(len(share.kept) for share in self._shares.values())
        size = sum(share.size for share in self._shares.values())
        return not kept or (
            kept < self._max_grammars and size + len(grammar.text) <= self._max_bytes
        )

    def _drop_oldest(self) -> None:
        """Drop the least recently used grammar of the cache salt that uses the largest share of the
        cache."""
        cache_salt, share = max(
            self._shares.items(),
            key=lambda item: max(
                len(item[1].kept) / self._max_grammars, item[1].size / self._max_bytes
            ),
        )
        oldest, _ = share.kept.popitem(last=False)
        share.size -= len(oldest.text)
        if not share.kept:
            del self._shares[cache_salt]


def grammars_of(
    tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]
) -> CompiledGrammars:
    """Create a cache of grammars that are compiled for the tokens of one tokenizer. See
    ``baton.grammars.grammar_library``."""

    def load() -> Compile:
        try:
            # Imported here alone: the library and its tables take memory, and a machine may lack
            # it.
            from baton.grammars.grammar_library import GrammarCompiler  # noqa: PLC0415

            return GrammarCompiler(tokenizer_json(), vocab_size, eos_ids).compile
        except (ImportError, OSError, ValueError) as error:
            raise InvalidGrammar(
                f"this model's tokenizer does not support grammars: {reason_in(str(error))}"
            ) from None

    return CompiledGrammars(load, vocab_size)
