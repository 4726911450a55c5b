"""Measures the cost of structured output in the steps of one engine.

    python -m loadtest.engine.grammar_bench --model FOLDER

Two sets of sequences decode in one engine: one without a grammar, one that follows a JSON schema.
Their steps alternate, so that other load of the machine affects both.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.grammar import Grammar, GrammarKind
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, warm_up
from engine.execution.grammar_rows import GrammarRows
from engine.sampling.sampling import SampleRow
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from loadtest.common.bench_app import Figures, ModelFolder, bench_app, say
from planning.common.report import this_machine

Say = Callable[[str], None]

_PROMPT_TOKENS = 48
_LOWEST_ID = 100
"""Lowest token id in prompts. Lower ids may be control tokens, which come first in a vocabulary."""
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["reader", "writer", "editor"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": _PERSON, "minItems": 1000}
"""JSON schema of a list of at least 1000 people. Such an answer is so long that no sequence ends
during the measured steps."""


@dataclass(frozen=True, slots=True)
class GrammarBenchSettings:
    """Settings of one measurement of structured output."""

    model: Path
    batches: tuple[int, ...] = (1, 8, 32)
    steps: int = 100
    """Number of measured engine steps with a grammar, and also of those without, at each batch
    size."""
    output: Path | None = None
    """JSON file to which the figures are written."""


@dataclass(frozen=True, slots=True)
class GrammarCost:
    """Cost of structured output at one batch size. Each figure is a median over engine steps.

    Step times are in milliseconds; ``mask_us`` is in microseconds per sequence.
    """

    batch: int
    temperature: float
    plain_ms: float
    strict_ms: float
    mask_us: float


class _TimedRows(GrammarRows):
    """Records how long each engine step computes grammar masks."""

    seconds = 0.0

    def masked(self, sequence_ids, draws: list[SampleRow]) -> list[SampleRow]:  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        found = super().masked(sequence_ids, draws)
        self.seconds = time.perf_counter() - began
        return found


def bench_grammar(settings: GrammarBenchSettings, say: Say, console: Console) -> list[GrammarCost]:
    """Measure the cost of structured output, print a table, and write the JSON file of
    ``settings.output``."""
    say("loading the model")
    engine = build_engine(EngineSettings(settings.model, max_sequences=2 * max(settings.batches)))
    warm_up(engine)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PEOPLE))
    compile_ms = [_compile_ms(engine, grammar) for _ in range(2)]
    say(f"tokenizer and grammar: {compile_ms[0]:.1f} ms; another grammar: {compile_ms[1]:.2f} ms")
    costs = []
    for batch in settings.batches:
        for temperature in (0.0, 1.0):
            say(f"{batch} sequences, temperature {temperature:g}")
            costs.append(measure(engine, grammar, batch, temperature, settings.steps))
    console.print(_table(costs))
    console.print(this_machine().line())
    if settings.output is not None:
        found = {
            "machine": asdict(this_machine()),
            "compile_ms": compile_ms,
            "costs": [asdict(cost) for cost in costs],
        }
        settings.output.write_text(json.dumps(found, indent=1))
    return costs


def _compile_ms(engine: Engine, grammar: Grammar) -> float:
    # A space makes another text with the same meaning.
    while engine.grammars.kept(grammar) is not None:
        grammar = replace(grammar, text=grammar.text + " ")
    began = time.perf_counter()
    engine.grammars.matcher(grammar)
    return (time.perf_counter() - began) * 1e3


class _Set:
    """Sequences that decode together, and their current step."""

    def __init__(self, engine: Engine, first: int, batch: int, blocks: int) -> None:
        self._engine = engine
        self._ids = range(first, first + batch)
        self._tables = {
            number: tuple(range(number * blocks, (number + 1) * blocks)) for number in self._ids
        }
        self._at = _PROMPT_TOKENS

    def begin(self, sampling: SamplingParams) -> None:
        chance = random.Random(0)  # noqa: S311
        vocab = self._engine.config.vocab_size
        stops = self._engine.config.eos_ids
        for number in self._ids:
            prompt = tuple(chance.randrange(_LOWEST_ID, vocab) for _ in range(_PROMPT_TOKENS))
            new = NewSequence(number, prompt, len(prompt), replace(sampling, seed=number), stops)
            if sampling.grammar is not None:
                new = replace(new, matcher=self._engine.grammars.matcher(sampling.grammar))
            row = PlanRow(number, 0, len(prompt), self._tables[number], True)
            self._engine.runner.run(StepPlan(0, (new,), (), (row,)))

    def step_s(self) -> float:
        rows = tuple(PlanRow(n, self._at, 1, self._tables[n], True) for n in self._ids)
        self._at += 1
        began = time.perf_counter()
        result = self._engine.runner.run(StepPlan(0, (), (), rows))
        assert not result.failed, result.failed
        return time.perf_counter() - began

    def end(self) -> None:
        for number in self._ids:
            self._engine.runner.forget(number)


def measure(
    engine: Engine, grammar: Grammar, batch: int, temperature: float, steps: int
) -> GrammarCost:
    """Measure decode steps of ``batch`` sequences with ``grammar``, and of as many without.
    ``grammar`` must not let a sequence end during the steps.
    """
    rows = _TimedRows(engine.config.vocab_size)
    engine.runner._grammars = rows
    size = engine.cache.block_size
    blocks = -(-(_PROMPT_TOKENS + steps + 2) // size)
    plain = _Set(engine, 0, batch, blocks)
    strict = _Set(engine, batch, batch, blocks)
    sampling = SamplingParams(temperature=temperature, max_tokens=1 << 20, ignore_eos=True)
    plain.begin(sampling)
    strict.begin(replace(sampling, grammar=grammar))
    plain_s, strict_s, mask_s = [], [], []
    for _ in range(steps):
        plain_s.append(plain.step_s())
        strict_s.append(strict.step_s())
        mask_s.append(rows.seconds / batch)
    plain.end()
    strict.end()
    return GrammarCost(
        batch,
        temperature,
        statistics.median(plain_s) * 1e3,
        statistics.median(strict_s) * 1e3,
        statistics.median(mask_s) * 1e6,
    )


def _table(costs: list[GrammarCost]) -> Table:
    table = Table("sequences", "temperature", "plain ms", "strict ms", "strict/plain", "µs a mask")
    for cost in costs:
        table.add_row(
            str(cost.batch),
            f"{cost.temperature:g}",
            f"{cost.plain_ms:.2f}",
            f"{cost.strict_ms:.2f}",
            f"{cost.strict_ms / cost.plain_ms:.3f}",
            f"{cost.mask_us:.0f}",
        )
    return table


def main(
    model: ModelFolder,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind at each size.")] = 100,
    output: Figures = None,
) -> None:
    """Measure what structured output adds to a step."""
    bench_grammar(GrammarBenchSettings(model, steps=steps, output=output), say, Console())


app = bench_app(main)

if __name__ == "__main__":
    app()
