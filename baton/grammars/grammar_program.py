"""The program that tries grammars, in a process of baton.sandbox.

Its setup is that of ``GrammarCompiler``. Requests and answers:

    {"kind": "regex", "text": "a+"}    {}, {"refused": "why"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind
from baton.grammars.grammar_library import GrammarCompiler


def prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the tokenizer. Raises ValueError for one that the library cannot use."""
    compiler = GrammarCompiler(setup["tokenizer_json"], setup["vocab_size"], setup["eos_ids"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            compiler.compile(Grammar(GrammarKind(request["kind"]), request["text"]))
        except InvalidGrammar as error:
            return {"refused": error.message}
        return {}

    return answer
