"""Measures the quality cost of quantization: perplexity of a text, and agreement of greedy answers.

The text is cut into windows, and each is computed from an empty context. Perplexity is over all of
a window's tokens after its first. The most likely tokens are compared with the first engine's at
every position of the text, and in answers that continue each window's start. In an answer, one
difference changes all tokens after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from tokenizers import Tokenizer

from baton.errors import ConfigError
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.engine import Engine
from engine.offline import generate
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from planning.common.report import whole_table

_STEP_TOKENS = 128
"""Number of tokens in one step. It is small because the step returns the logits of every token,
which are large for a large vocabulary."""


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """Settings of a quality measurement. All values are numbers of tokens."""

    text_tokens: int = 8192
    """Number of tokens of the text to measure, from its start. The rest of the text is ignored."""
    window: int = 512
    prompt: int = 64
    """Number of tokens at the start of each window that are the prompt of a greedy answer."""
    answer: int = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one engine over the whole text."""

    name: str
    tokens: int
    """Number of tokens over which the perplexity is computed."""
    perplexity: float
    same_choice: float
    """Share of positions in the text at which this engine and the first engine have the same most
    likely token."""
    same_answer: float
    """Mean share of an answer that equals the first engine's answer, counted from its start to the
    first difference."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine whose quality is measured."""

    name: str
    build: Callable[[], Engine]


def measure(
    candidates: Sequence[Candidate],
    token_ids: Sequence[int],
    settings: QualitySettings,
    progress: Callable[[str], None],
) -> list[Quality]:
    """Measure the engines one after another, and compare each with the first. Only one engine is in
    memory at a time.

    Raises ConfigError if the text is shorter than a window.
    """
    windows = _windows(token_ids, settings)
    reference: _Findings | None = None
    results = []
    for candidate in candidates:
        progress(f"measuring {candidate.name}")
        found = _examine(candidate.build(), windows, settings)
        reference = reference or found
        results.append(
            Quality(
                candidate.name,
                len(found.losses),
                math.exp(math.fsum(found.losses) / len(found.losses)),
                _share(found.choices, reference.choices),
                _mean([*map(_common, found.answers, reference.answers)]),
            )
        )
    return results


def read_tokens(path: Path, tokenizer: Path) -> list[int]:
    """Return the tokens of a text file, or of the ``turns`` of all rows of a ``.jsonl`` file.

    Raises ConfigError if a file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            text = "\n\n".join(turn for row in rows for turn in row["turns"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises no more specific one
        raise ConfigError(f"{tokenizer} cannot be read: {error}") from error
    return list(loaded.encode(text, add_special_tokens=False).ids)


def draw(results: Sequence[Quality]) -> Table:
    """Return a Markdown table with the quality of each engine."""
    title = f"Perplexity over {results[0].tokens} tokens; agreement with {results[0].name}"
    table = whole_table(
        "weights", "perplexity", "change", "same choice", "same answer", title=title
    )
    for one in results:
        table.add_row(
            one.name,
            f"{one.perplexity:.3f}",
            f"{one.perplexity / results[0].perplexity - 1:+.2%}",
            f"{one.same_choice:.1%}",
            f"{one.same_answer:.1%}",
        )
    return table


@dataclass(frozen=True, slots=True)
class _Findings:
    losses: list[float]
    """Negative log-probability (-ln p) of each token after a window's first."""
    choices: list[int]
    """Most likely token at each position of ``losses``."""
    answers: list[tuple[int, ...]]


def _windows(token_ids: Sequence[int], settings: QualitySettings) -> list[list[int]]:
    text = token_ids[: settings.text_tokens]
    count = len(text) // settings.window
    if not count:
        raise ConfigError(
            f"the text has {len(text)} tokens, and a window {settings.window}; use a longer text "
            "or a shorter window"
        )
    size = settings.window
    return [list(text[n * size : (n + 1) * size]) for n in range(count)]


def _examine(engine: Engine, windows: list[list[int]], settings: QualitySettings) -> _Findings:
    if settings.window > engine.context_length:
        raise ConfigError(
            f"a window of {settings.window} tokens is longer than the context of "
            f"{engine.context_length}"
        )
    losses: list[float] = []
    choices: list[int] = []
    for window in windows:
        for logits, following in _predictions(engine, window):
            picked = logits.gather(1, following.unsqueeze(1)).squeeze(1)
            losses += (logits.logsumexp(dim=-1) - picked).tolist()
            choices += logits.argmax(dim=-1).tolist()
    return _Findings(losses, choices, _answers(engine, windows, settings))


def _predictions(engine: Engine, window: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield two tensors for each step: fp32 logits [tokens, vocab_size], and for each position the
    token that follows it in the text [tokens].
    """
    table = tuple(range(-(-len(window) // engine.cache.block_size)))
    for start in range(0, len(window) - 1, _STEP_TOKENS):
        part = window[start : min(start + _STEP_TOKENS, len(window) - 1)]
        row = PlanRow(0, start, len(part), table, False)
        step = StepInput((row,), part, list(range(len(part))), False)
        logits = engine.runner.model.run(step).logits
        assert logits is not None, "a step that is not greedy gives logits"
        following = torch.tensor(window[start + 1 : start + 1 + len(part)], device=logits.device)
        yield logits, following


def _answers(
    engine: Engine, windows: list[list[int]], settings: QualitySettings
) -> list[tuple[int, ...]]:
    """Return the engine's greedy answers to the windows' starts, all of full length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=settings.answer, ignore_eos=True)
    prompts = [tuple(window[: settings.prompt]) for window in windows]
    specs = [
        SequenceSpec(f"quality-{number}", 0, "", prompt, len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]
    return [output.token_ids for output in generate(engine, specs)]


def _common(answer: Sequence[int], reference: Sequence[int]) -> float:
    """Return the share of ``reference`` that ``answer`` repeats, counted from the start to the
    first difference."""
    pairs = enumerate(zip(answer, reference, strict=True))
    same = next((n for n, (one, other) in pairs if one != other), len(reference))
    return same / len(reference)


def _share(found: list[int], reference: list[int]) -> float:
    return _mean([float(one == other) for one, other in zip(found, reference, strict=True)])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
