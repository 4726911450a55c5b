"""Which row of a step's logits each draw and each score reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.sampling_params import SamplingParams
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampling import SampleRow
from engine.sampling.step import StepWork, by_row, result_of
from engine.scheduling.plan import PlanRow

TABLE = (0,)


@dataclass(frozen=True)
class Part:
    """A row of a step: ``prompt`` tokens of a sequence, then what it draws."""

    prompt: int
    choices: int = 0
    drafts: int = 0
    scored: int = 0
    logprobs: bool = False
    next_token: bool = False
    """Whether the row is the common one of a running answer: see ``StepWork.draw_next``."""

    @property
    def count(self) -> int:
        return self.prompt + self.drafts


@st.composite
def parts(draw: st.DrawFn) -> Part:
    if draw(st.booleans()):
        return Part(1, choices=1, next_token=True)
    prompt = draw(st.integers(1, 4))
    scored = draw(st.integers(0, prompt))
    choices = draw(st.integers(0, 3))
    drafts = draw(st.integers(0, 3)) if choices == 1 and not scored else 0
    return Part(prompt, choices, drafts, scored, logprobs=draw(st.booleans()))


@dataclass(frozen=True)
class Step:
    """A filled ``StepWork``. Token n of the step has the id n, so each token is itself only."""

    work: StepWork
    rows: list[PlanRow]
    expected: list[tuple[int, ...]]
    """The tokens whose logits the draws of each row must use."""
    scored: list[tuple[int, ...]]
    """The tokens whose logits score each row's prompt."""


def filled(every: list[Part]) -> Step:
    step = Step(StepWork(), [], [], [])
    work = step.work
    for number, part in enumerate(every):
        begin = len(work.token_ids)
        end = begin + part.count
        sampling = SamplingParams(temperature=0.0, logprobs=0 if part.logprobs else None)
        rows = [SampleRow(sampling, [], 0, (), n) for n in range(part.choices + part.drafts)]
        row = PlanRow(
            number,
            0,
            part.count,
            TABLE,
            sample=part.choices > 0,
            choices=max(1, part.choices),
            scored=part.scored,
            draft=tuple(range(end - part.drafts, end)),
        )
        if part.next_token:
            work.draw_next(begin, rows[0])
        else:
            work.token_ids += range(begin, end)
            if part.scored:
                work.score(row, range(begin, end + 1), 0)
            if part.choices > 1:
                work.draw_choices(rows)
            elif part.choices:
                work.draw(rows)
        step.rows.append(row)
        own = range(end - 1 - part.drafts, end)
        step.expected.append(tuple(own) if part.choices == 1 else (end - 1,) * part.choices)
        step.scored.append(tuple(range(begin, begin + part.scored)))
    return step


def logits_of(work: StepWork) -> torch.Tensor:
    """Logits of each output, fp32 [outputs, tokens + 1]: its own token is the likeliest."""
    logits = torch.zeros(len(work.outputs), len(work.token_ids) + 1)
    for output, token in enumerate(work.outputs):
        logits[output, token] = 20.0
    return logits


@given(st.lists(parts(), max_size=6))
def test_each_draw_reads_the_logits_of_its_own_last_token(every: list[Part]) -> None:
    step = filled(every)
    work = step.work
    expected = [token for row in step.expected for token in row]
    logits = logits_of(work)
    assert work.draw_logits(logits).argmax(dim=-1).tolist() == expected
    assert work.draw_best(logits.argmax(dim=-1).tolist()) == expected
    assert [work.outputs[row] for row in work.draw_rows] == expected


@given(st.lists(parts(), max_size=6))
def test_a_device_draws_alone_only_if_each_output_has_one_draw(every: list[Part]) -> None:
    step = filled(every)
    work = step.work
    if work.on_device:
        assert work.draw_rows == list(range(len(work.outputs)))
        # A GPU draws once from each output, and knows nothing of draws.
        if not any(part.drafts for part in every):
            assert list(by_row(step.rows, work.outputs)) == step.expected
    one_each = all(part.choices < 2 and not part.scored for part in every)
    assert work.on_device == (one_each and not work.needs_host)


@given(st.lists(parts(), max_size=6))
def test_each_score_reads_the_logits_of_its_own_token(every: list[Part]) -> None:
    """A token that its own logits name has a log probability of about 0, and another about -20."""
    step = filled(every)
    tokens = tuple(step.expected)
    found = result_of(1, step.rows, step.work, tokens, logits_of(step.work), token_logprobs)
    for part, scores in zip(every, found.logprobs or [None] * len(every), strict=True):
        wanted = len(scores or ())
        assert wanted == (part.choices + part.drafts if part.logprobs else 0)
        assert all(score.logprob > -1e-3 for score in scores or ())
    if step.work.scored:
        assert [len(scores) for scores in found.prompt_logprobs] == [p.scored for p in every]
    assert [step.work.outputs[one.row] for one in step.work.scored] == [
        token for row in step.scored for token in row
    ]


def test_a_scored_prompt_and_two_choices_of_another_do_not_share_rows() -> None:
    """Two outputs and two draws: equal numbers, and still no output has a draw of its own."""
    step = filled([Part(1, scored=1), Part(3, choices=2)])
    assert len(step.work.outputs) == len(step.work.draws) == 2
    assert step.work.draw_logits(logits_of(step.work)).argmax(dim=-1).tolist() == [3, 3]
    assert not step.work.on_device
