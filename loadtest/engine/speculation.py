"""Compares one engine with and without speculative decoding, alternating on the same prompts.

    python -m loadtest.engine.speculation --model FOLDER --concurrency 1,4,16

There is no cluster, only the engine's own steps, planned by its scheduler. Tokens per second are
those of steps without prompts, including planning and processing of results: the work of a decode
worker's engine when prompts are computed elsewhere.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from baton.errors import BatonError, ConfigError
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence, warm_up
from engine.execution.runner import Ending
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from loadtest.common.bench_app import (
    Figures,
    ModelFolder,
    bench_app,
    counts_in,
    names_in,
    say,
)
from loadtest.engine.speculation_prompts import COPY, copying_tasks, read_questions
from planning.common.report import Machine, print_whole, this_machine, whole_table, write_json
from router.text.tokenizer import Tokenizer
from worker.costs.calibration import calibrate

Say = Callable[[str], None]

_MAX_CHARACTERS = 1 << 20
_MIN_PROMPTS = 4
"""Minimum number of prompts in a group. A group runs with drafts and without in turn, before the
next group runs."""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Settings of a measurement of speculative decoding."""

    engine: EngineSettings
    """Settings of the engine. The benchmark compares decoding with the ``drafter`` of these
    settings and without one."""
    prompts: Path | None = None
    """Folder of ``.jsonl`` files with prompts; see `read_questions`. If it is None, only the
    copying tasks are measured."""
    categories: tuple[str, ...] = ()
    """Categories of prompts to measure; empty: all."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    rows: int = 8
    """Number of prompts to measure per category. It is raised to twice the concurrency if that is
    larger and the category has enough prompts."""
    answer_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 2
    """Number of runs with drafts, and also of runs without. Of each, only the fastest run counts,
    since disturbances only make a run longer."""


@dataclass(slots=True)
class Run:
    """Results of one run of the engine on a group of prompts. They cover decode steps only, not
    prefill."""

    tokens: int = 0
    turns: int = 0
    """Sum of the batch sizes of all steps: a sequence counts once in each step. Without drafts, it
    equals ``tokens``."""
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Record the tokens and the time of one step."""
        self.turns += len(plan.rows)
        self.tokens += len(plan.rows) + result.accepted
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """Results of one category of prompts at one concurrency."""

    category: str
    concurrency: int
    prompts: int
    plain_tokens_per_s: float
    tokens_per_s: float
    acceptance_length: float
    """Mean number of tokens that a sequence gets per step."""
    drafted: int
    accepted: int
    same_answers: int
    """Number of prompts whose answers with drafts and without drafts are the same tokens."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else 0.0


def bench_speculation(
    settings: SpeculationSettings, say: Say, console: Console, output: Path | None
) -> None:
    """Measure speculative decoding, print a table, and write ``output`` as JSON. Raises BatonError.

    Raises ConfigError before the measurement if ``output`` cannot be written or a category is
    unknown.
    """
    if output is not None:
        write_json(output, "{}\n")
    machine = this_machine()
    texts = _texts(settings)
    bench = SpeculationBench(settings)
    rows = []
    for category, questions in texts.items():
        for concurrency in settings.concurrency:
            say(f"measuring {category}, {concurrency} at a time")
            row = bench.measure(category, questions, concurrency)
            say(f"{row.speedup:.2f} times the tokens a second")
            rows.append(row)
            if output is not None:
                write_json(output, _json(settings, machine, rows))
    print_whole(console, draw(rows, machine))


def _texts(settings: SpeculationSettings) -> dict[str, list[str]]:
    found = read_questions(settings.prompts) if settings.prompts is not None else {}
    found[COPY] = copying_tasks()
    unknown = set(settings.categories) - found.keys()
    if unknown:
        raise ConfigError(f"no category {min(unknown)!r}; there are: {', '.join(found)}")
    return {name: found[name] for name in settings.categories or found}


class SpeculationBench:
    """One engine that runs with and without drafts, in the same memory."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._engine = build_engine(settings.engine)
        warm_up(self._engine)
        self._tokenizer = Tokenizer.load(settings.engine.model_path)
        runner = self._engine.runner
        # It is kept for all measurements, as in a worker, since what it learns is part of the
        # result.
        plain = type(runner)(runner.model, runner.cache, runner.device)
        self._runners = {True: runner, False: plain}
        # A worker does the same before it serves.
        calibrate(self._engine, runner.run)
        self._next_id = 0

    def measure(self, category: str, questions: Sequence[str], concurrency: int) -> SpeculationRow:
        """Measure one category of prompts. A few prompts at a time run with and without drafts
        alternately; for each way the fastest run counts."""
        count = max(self._settings.rows, 2 * concurrency)
        prompts = [self._prompt(question) for question in questions[:count]]
        few = max(concurrency, _MIN_PROMPTS)
        runs: dict[bool, list[Run]] = {False: [], True: []}
        for start in range(0, len(prompts), few):
            found = self._in_turns(prompts[start : start + few], concurrency)
            for drafts, run in found.items():
                runs[drafts].append(run)
        plain, drafted = runs[False], runs[True]
        return SpeculationRow(
            category,
            concurrency,
            len(prompts),
            _rate(plain),
            _rate(drafted),
            sum(run.tokens for run in drafted) / max(1, sum(run.turns for run in drafted)),
            sum(run.drafted for run in drafted),
            sum(run.accepted for run in drafted),
            sum(
                one == other
                for runs_of_one in zip(plain, drafted, strict=True)
                for one, other in zip(*(run.answers for run in runs_of_one), strict=True)
            ),
        )

    def _in_turns(self, prompts: Sequence[tuple[int, ...]], concurrency: int) -> dict[bool, Run]:
        best: dict[bool, Run] = {}
        for number in range(self._settings.repeats):
            for drafts in (False, True) if number % 2 == 0 else (True, False):
                run = self._run(prompts, concurrency, drafts)
                if drafts not in best or run.seconds < best[drafts].seconds:
                    best[drafts] = run
        return best

    def _prompt(self, question: str) -> tuple[int, ...]:
        """Return the prompt's token ids, in the model's chat template if it has one."""
        try:
            messages = [{"role": "user", "content": question}]
            text = self._tokenizer.render_chat(messages, _MAX_CHARACTERS).result()
        except BatonError:
            return self._tokenizer.encode(question)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _run(self, prompts: Sequence[tuple[int, ...]], concurrency: int, drafts: bool) -> Run:
        run = Run()
        engine = self._fresh_engine(concurrency, drafts)
        sequences = []
        for prompt in prompts:
            self._next_id += 1
            spec = SequenceSpec(str(self._next_id), 0, "", prompt, len(prompt), self._sampling)
            sequences.append(make_sequence(engine, self._next_id, spec))
            engine.scheduler.add(sequences[-1])
        # On a GPU a step starts while the one before runs.
        depth = 2 if engine.runner.overlaps else 1
        flight: deque[tuple[StepPlan, Ending]] = deque()
        ended = time.perf_counter()
        while True:
            while len(flight) < depth and (plan := engine.scheduler.schedule()) is not None:
                flight.append((plan, engine.runner.start(plan)))
            if not flight:
                break
            plan, ending = flight.popleft()
            result = ending()
            engine.scheduler.complete(plan, result)
            before, ended = ended, time.perf_counter()
            if plan.decodes_only:
                run.add(plan, result, ended - before)
        run.answers = [sequence.token_ids for sequence in sequences]
        return run

    @property
    def _sampling(self) -> SamplingParams:
        settings = self._settings
        return SamplingParams(
            temperature=settings.temperature, seed=7, max_tokens=settings.answer_tokens
        )

    def _fresh_engine(self, concurrency: int, drafts: bool) -> Engine:
        """Return an engine with an empty cache that runs ``concurrency`` sequences. ``drafts`` is
        true if the engine uses its drafter.
        """
        built = self._engine
        built.pool.drop_cache()
        limits = replace(built.scheduler.limits, max_sequences=concurrency)
        if not drafts:
            limits = replace(limits, draft_tokens=0)
        scheduler = Scheduler(built.pool, limits)
        return replace(built, runner=self._runners[drafts], scheduler=scheduler)


def _rate(runs: Sequence[Run]) -> float:
    """Return the tokens per second over all ``runs`` together."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.tokens for run in runs) / seconds if seconds else 0.0


def draw(rows: Sequence[SpeculationRow], machine: Machine) -> Table:
    """Return a Markdown table of the results."""
    table = whole_table(
        *("category", "at a time", "prompts", "tokens/s without", "tokens/s with", "ratio"),
        *("tokens a step", "drafted", "accepted", "same answers"),
        title=machine.line(),
    )
    for row in rows:
        table.add_row(
            row.category,
            str(row.concurrency),
            str(row.prompts),
            f"{row.plain_tokens_per_s:.0f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.speedup:.2f}",
            f"{row.acceptance_length:.2f}",
            str(row.drafted),
            str(row.accepted),
            f"{row.same_answers} of {row.prompts}",
        )
    return table


def _json(settings: SpeculationSettings, machine: Machine, rows: Sequence[SpeculationRow]) -> str:
    draft = settings.engine.draft_model
    found: Mapping[str, object] = {
        "machine": asdict(machine),
        "drafter": settings.engine.drafter,
        "draft_model": "" if draft is None else draft.name,
        "quantization": settings.engine.quantization,
        "temperature": settings.temperature,
        "answer_tokens": settings.answer_tokens,
        "rows": [asdict(row) | {"speedup": row.speedup} for row in rows],
    }
    return json.dumps(found, indent=1) + "\n"


def main(
    model: ModelFolder,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of .jsonl files with `category` and `turns`. Default: copying tasks.",
        ),
    ] = None,
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        typer.Option(help="Weight format: auto keeps that of the files, none does not quantize."),
    ] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float32", "float16"], typer.Option(help="Data type of activations.")
    ] = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 means one per core.")] = 0,
    drafter: Annotated[
        Literal["ngram", "draft", "eagle", "medusa"],
        typer.Option(help="Speculative method to compare with none."),
    ] = "ngram",
    draft_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Smaller model for `draft`, or the heads for `eagle` and `medusa`.",
        ),
    ] = None,
    categories: Annotated[
        str, typer.Option(help="Categories of prompts; `copy` is built in. Default: all.")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent sequences.")] = "1,4,16",
    rows: Annotated[
        int,
        typer.Option(min=1, help="Prompts per category; at least twice the concurrency is used."),
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs with and without drafts.")] = 2,
    output: Figures = None,
) -> None:
    """Measure the speedup of speculative decoding on the CPU."""
    engine = EngineSettings(
        model,
        dtype=dtype,
        device="cpu",
        threads=threads,
        quantization=quantization,
        drafter=drafter,
        draft_model=draft_model,
    )
    settings = SpeculationSettings(
        engine,
        prompts,
        names_in(categories),
        counts_in(concurrency),
        rows,
        tokens,
        temperature,
        repeats,
    )
    bench_speculation(settings, say, Console(), output)


app = bench_app(main)

if __name__ == "__main__":
    app()
