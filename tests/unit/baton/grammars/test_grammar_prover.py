"""Grammars that take seconds and gigabytes are refused, and cost the asking process nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from typing import Any

import psutil
import pytest

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind
from baton.grammars import grammar_prover
from baton.grammars.compiled_grammars import CompiledGrammars, grammars_of, proofs_of
from baton.grammars.grammar_gate import GrammarGate
from baton.grammars.grammar_prover import GrammarProver, Proven
from tests.support.baton.grammar_tools import (
    end_id,
    regex,
    schema,
    small_tokenizer,
    vocab_size,
)

CPU_S, MEMORY_BYTES = 1.0, 128 << 20


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def intersection(terms: int) -> Grammar:
    return lark("start: A\nA: " + " & ".join(f"/.*w{n}.*/" for n in range(terms)))


HOSTILE = {f"{terms} terms": intersection(terms) for terms in (22, 24, 28)} | {
    "a union of intersections": lark(
        "start: A\nA: " + " | ".join(f"({intersection(24).text[12:]})" for _ in range(2))
    ),
}


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds with which tests take a second each."""
    monkeypatch.setattr(grammar_prover, "MAX_CPU_S", CPU_S)
    monkeypatch.setattr(grammar_prover, "MAX_MEMORY_BYTES", MEMORY_BYTES)


@pytest.fixture
def prover(tight: None) -> GrammarProver:
    return GrammarProver(small_tokenizer().to_str, vocab_size(), [end_id()])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_beyond_the_bounds_is_refused_and_costs_this_process_nothing(
    name: str, prover: GrammarProver
) -> None:
    assert prover.prove(regex("a")) == Proven()
    cpu, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        InvalidGrammar, match=r"needs more than (1 s of CPU time|128 MiB of memory) to compile"
    ):
        prover.prove(HOSTILE[name])
    assert time.process_time() - cpu < CPU_S / 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 16 << 10
    assert prover.prove(regex("b")) == Proven()


def test_the_largest_usual_schema_is_proven() -> None:
    many = schema(
        json.dumps(
            {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4000)}}
        )
    )
    prover = GrammarProver(small_tokenizer().to_str, vocab_size(), [end_id()])
    assert prover.prove(many) == Proven()


async def test_another_tenants_grammar_is_ready_while_the_worst_one_compiles(
    tight: None,
) -> None:
    gate = GrammarGate(proofs_of(small_tokenizer().to_str, vocab_size(), [end_id()]))
    deadline = time.monotonic() + 60
    before = set(psutil.Process().children(recursive=True))
    await gate.ready(regex("a"), b"first", deadline)
    started = set(psutil.Process().children(recursive=True)) - before
    (child,) = (one for one in started if one.parent() in started)
    # The worst grammar takes as long as the test wants.
    child.suspend()
    worst = asyncio.create_task(gate.ready(intersection(24), b"hostile", deadline))
    behind = asyncio.create_task(gate.ready(regex("b"), b"hostile", deadline))
    await asyncio.sleep(0)
    assert await gate.ready(regex("c"), b"other", deadline) == Proven()
    assert not worst.done()
    assert not behind.done()
    child.resume()
    with pytest.raises(InvalidGrammar, match="simplify it"):
        await worst
    assert await behind == Proven()


def test_a_worker_compiles_only_what_is_proven(tight: None) -> None:
    grammars = grammars_of(small_tokenizer().to_str, vocab_size(), [end_id()])
    assert not grammars.matcher(regex("a")).is_error()
    cpu = time.process_time()
    with pytest.raises(InvalidGrammar, match="simplify it"):
        grammars.matcher(intersection(24))
    assert time.process_time() - cpu < CPU_S / 4


@pytest.mark.parametrize("tokenizer_json", ["{}", "[" * 100_000, "\x00"])
def test_a_tokenizer_that_the_library_cannot_use(tokenizer_json: str) -> None:
    both: tuple[CompiledGrammars[Any], ...] = (
        proofs_of(lambda: tokenizer_json, 8, [1]),
        grammars_of(lambda: tokenizer_json, 8, [1]),
    )
    for grammars in both:
        with pytest.raises(InvalidGrammar, match="does not support grammars"):
            grammars.matcher(regex("a"))


def test_the_reason_of_a_refusal_is_that_of_the_library(prover: GrammarProver) -> None:
    with pytest.raises(InvalidGrammar, match="unclosed group"):
        prover.prove(regex("("))
    with pytest.raises(InvalidGrammar, match="surrogates"):
        prover.prove(regex("\ud800"))
