"""Cache of the grammars that a process has compiled or proven, bounded in number and in bytes.

Like the KV cache, it is separate for each cache salt, so a tenant cannot infer another tenant's
grammars from compile times. Evictions take from the salt that holds the most.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from baton.errors import Unavailable
from baton.grammar import Grammar, TokenMatcher
from baton.grammars.grammar_prover import GrammarProver, Proven, unsupported


class _Copyable(Protocol):
    def deep_copy(self) -> Self: ...


M = TypeVar("M", bound=_Copyable)
"""What a grammar is compiled to: a ``TokenMatcher``, or ``Proven`` in a process that needs none."""
Compile = Callable[[Grammar], M]
"""Function that compiles a grammar. It raises InvalidGrammar."""


@dataclass(slots=True)
class _Share(Generic[M]):
    """The compiled grammars of one cache salt, least recently used first."""

    kept: OrderedDict[Grammar, M] = field(default_factory=OrderedDict)
    size: int = 0
    """Size of the grammars' texts, in bytes."""


class CompiledGrammars(Generic[M]):
    """Compiles and keeps grammars. Thread-safe: callers wait for their own grammars alone."""

    def __init__(
        self,
        load: Callable[[], Compile[M]],
        vocab_size: int,
        *,
        max_grammars: int = 64,
        max_bytes: int = 2 << 20,
    ) -> None:
        """Create an empty cache. ``load`` returns the compiler. It is called for the first
        grammar.

        The token masks of matchers have ``vocab_size`` bits.

        The cache keeps up to ``max_grammars`` grammars, whose texts have up to ``max_bytes`` in
        all. It always keeps the latest grammar.
        """
        self.vocab_size = vocab_size
        self._load = load
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._compile: Compile[M] | None = None
        self._shares: OrderedDict[bytes, _Share[M]] = OrderedDict()
        """Compiled grammars by cache salt, least recently used salt first."""
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def kept(self, grammar: Grammar, cache_salt: bytes = b"") -> M | None:
        """Return a new matcher of a grammar, at the start of a text, if the cache has the grammar;
        else None."""
        found = self._find(grammar, cache_salt)
        return None if found is None else found.deep_copy()

    def matcher(self, grammar: Grammar, cache_salt: bytes = b"") -> M:
        """Return a new matcher of a grammar, at the start of a text. If the cache does not have the
        grammar, compile it.

        Raises InvalidGrammar.
        """
        found = self._find(grammar, cache_salt) or self._compiled(grammar, cache_salt)
        return found.deep_copy()

    def _find(self, grammar: Grammar, cache_salt: bytes) -> M | None:
        with self._lock:
            share = self._shares.get(cache_salt)
            found = None if share is None else share.kept.get(grammar)
            if share is not None and found is not None:
                self._shares.move_to_end(cache_salt)
                share.kept.move_to_end(grammar)
            return found

    def _compiled(self, grammar: Grammar, cache_salt: bytes) -> M:
        with self._loading:
            if self._compile is None:
                self._compile = self._load()
        matcher = self._compile(grammar)
        with self._lock:
            share = self._shares.get(cache_salt)
            if share is not None and grammar in share.kept:
                # Another thread has compiled the grammar meanwhile.
                return share.kept[grammar]
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
) -> CompiledGrammars[TokenMatcher]:
    """Create a cache of grammars that are compiled for the tokens of one tokenizer, each after its
    proof. See ``baton.grammars.grammar_library``."""
    prover = GrammarProver(tokenizer_json, vocab_size, eos_ids)

    def load() -> Compile[TokenMatcher]:
        # The sandbox gets the tokenizer first.
        prover.start()
        try:
            # Imported here alone: the library and its tables take memory, and a machine may lack
            # it.
            from baton.grammars.grammar_library import GrammarCompiler  # noqa: PLC0415

            compiler = GrammarCompiler(tokenizer_json(), vocab_size, eos_ids)
        except (ModuleNotFoundError, ValueError) as error:
            raise unsupported(error) from None
        except (ImportError, OSError, MemoryError) as error:
            # The machine is at fault, such as one without memory, and not the request.
            raise Unavailable(f"the grammar library cannot be loaded: {error}") from None

        def proven_first(grammar: Grammar) -> TokenMatcher:
            prover.prove(grammar)
            return compiler.compile(grammar)

        return proven_first

    return CompiledGrammars(load, vocab_size)


def proofs_of(
    tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]
) -> CompiledGrammars[Proven]:
    """Create a cache of grammars that are proven for the tokens of one tokenizer. Nothing is
    compiled in this process."""
    prover = GrammarProver(tokenizer_json, vocab_size, eos_ids)
    return CompiledGrammars(lambda: prover.prove, vocab_size)
