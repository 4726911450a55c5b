"""Tries grammars in a sandboxed process, before a process that has other work compiles them.

llguidance cannot be interrupted while it compiles, and some short grammars take gigabytes. What
compiles within the bounds here takes no more where it is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, reason_in
from baton.sandbox.sandbox import BoundExceeded, Bounds, ProgramBroken, Sandbox

MAX_CPU_S = 4.0
"""Maximum CPU time to compile a grammar, in seconds. A schema of 4000 optional properties, which is
about as large as a grammar's text may be, takes 1.2 to 1.9."""
MAX_MEMORY_BYTES = 256 << 20
"""Maximum memory to compile a grammar, in bytes. That schema takes 50 MiB."""
_PREPARE_CPU_S = 30.0
_PREPARE_MEMORY_BYTES = 4 << 30
"""Maximum memory to load a tokenizer, in bytes. One of 256 thousand tokens takes about 300 MiB."""


@dataclass(frozen=True, slots=True)
class Proven:
    """Says that workers can compile a grammar."""

    def deep_copy(self) -> Proven:
        return self


class GrammarProver:
    """Compiles grammars for the tokens of one tokenizer, in a process that starts with the first
    grammar. Any thread may use it."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        """Create a prover for the contents of a tokenizer.json; see ``GrammarCompiler``."""
        self._sandbox = Sandbox(
            "baton.grammars.grammar_program",
            lambda: {
                "tokenizer_json": tokenizer_json(),
                "vocab_size": vocab_size,
                "eos_ids": list(eos_ids),
            },
            Bounds(MAX_CPU_S, MAX_MEMORY_BYTES, _PREPARE_CPU_S, _PREPARE_MEMORY_BYTES),
        )

    def start(self) -> None:
        """Load the tokenizer in the sandbox. Raises InvalidGrammar for one that the library cannot
        use, and Unavailable if no process can be started."""
        try:
            self._sandbox.start()
        except (ProgramBroken, OSError) as error:
            raise unsupported(error) from None

    def prove(self, grammar: Grammar) -> Proven:
        """Return if the grammar compiles within the bounds. Raises InvalidGrammar,
        DeadlineExceeded on an overloaded machine, and Unavailable if no process can be started."""
        try:
            answer = self._sandbox.ask({"kind": grammar.kind, "text": grammar.text})
        except BoundExceeded as error:
            raise InvalidGrammar(f"it needs {error} to compile; simplify it") from None
        except (ProgramBroken, OSError) as error:
            raise unsupported(error) from None
        if "refused" in answer:
            raise InvalidGrammar(answer["refused"])
        return Proven()


def unsupported(error: Exception) -> InvalidGrammar:
    """Return the error for a tokenizer that the grammar library cannot use."""
    return InvalidGrammar(
        f"this model's tokenizer does not support grammars: {reason_in(str(error))}"
    )
