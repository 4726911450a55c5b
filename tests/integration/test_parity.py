"""Our decoder computes what ``transformers`` computes on the same folder.

Its greedy tokens are compared by teacher forcing: one forward pass of the reference over a prompt
and our answer tells at every position what it would have taken, so that every position counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import EngineSettings
from engine.execution.runner import ModelRunner
from engine.offline import generate
from engine.sampling.step import StepInput, StepModel, StepOutput
from router.text.tokenizer import Tokenizer
from tests.support.models import real_model

PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "prompts"
ANSWER, LONG_ANSWER = 20, 64
LOGITS_TOLERANCE = 1e-3
"""Also the gap between the two likeliest tokens above which both must take the same one."""

CLEAR_GAP = 1.0
"""In logits, between the two likeliest tokens: bfloat16 does not turn such an order."""


class RecordingModel:
    """Keeps the logits of all that it computes, by sequence."""

    def __init__(self, inner: StepModel) -> None:
        self._inner = inner
        self._logits: dict[int, list[torch.Tensor]] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def run(self, step: StepInput) -> StepOutput:
        everything = replace(step, outputs=list(range(len(step.token_ids))), greedy=False)
        logits = self._inner.run(everything).logits
        assert logits is not None
        pieces = torch.split(logits.clone(), [row.count for row in step.rows])
        for row, piece in zip(step.rows, pieces, strict=True):
            self._logits.setdefault(row.sequence_id, []).append(piece)
            self._spans.setdefault(row.sequence_id, []).append((row.start, row.start + row.count))
        return StepOutput(None, logits[step.outputs])

    @property
    def layers_done(self) -> int:
        return self._inner.layers_done

    def clear_progress(self) -> None:
        self._inner.clear_progress()

    def use_threads(self, threads: int) -> None:
        self._inner.use_threads(threads)

    def logits(self, sequence_id: int) -> torch.Tensor:
        """fp32 [computed tokens, vocab_size], without the tokens that came from the cache."""
        spans = self._spans[sequence_id]
        assert all(before[1] == after[0] for before, after in pairwise(spans)), spans
        return torch.cat(self._logits[sequence_id])


@dataclass(frozen=True)
class Answered:
    """A prompt, our answer, and our logits at the last ``len(logits)`` of their positions.

    The answer's last token is not computed, and the first ones may have come from the cache.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model()


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[tuple[int, ...]]:
    """Twenty chats of all categories as token ids, about 40 to 900 each."""
    questions = _rows("mt_bench_question.jsonl")[::10] + _rows("spec_bench_sample.jsonl")[::14]
    tokenizer = Tokenizer.load(model)
    assert len(questions) == 20
    chats = [[{"role": "user", "content": question["turns"][0]}] for question in questions]
    texts = [tokenizer.render_chat(chat, limit=1 << 20).result() for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _rows(name: str) -> list[dict[str, Any]]:
    if not PROMPTS.is_dir():
        pytest.skip("the prompts are not beside the repository")
    return [json.loads(line) for line in (PROMPTS / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.inference_mode()
def reference_logits(reference: Any, answered: Answered) -> torch.Tensor:
    """fp32 [tokens - 1, vocab_size] of prompt and answer; the answer's last token has no next."""
    tokens = torch.tensor([answered.prompt + answered.answer[:-1]])
    logits: torch.Tensor = reference(tokens, use_cache=False).logits[0]
    return logits


def answer(
    model: Path, dtype: str, prompts: list[tuple[int, ...]], tokens: int, **settings: Any
) -> list[Answered]:
    """Greedy answers of one engine, all prompts queued at once."""
    base = EngineSettings(model, dtype, "cpu", threads=1, kv_pool_bytes=512 << 20)
    built = build_engine(replace(base, **settings))
    recording = RecordingModel(built.runner.model)
    runner = ModelRunner(recording, built.cache, built.runner.device)
    engine = replace(built, runner=runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = generate(
        engine, [SequenceSpec("", 0, "", prompt, len(prompt), sampling) for prompt in prompts]
    )
    return [
        Answered(prompt, output.token_ids, recording.logits(number))
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def check_tokens(answered: Answered, expected: torch.Tensor, gap: float) -> int:
    """The answer holds the likeliest tokens wherever the choice is clear; returns how often."""
    top = expected[len(answered.prompt) - 1 :].topk(2)
    clear = top.values[:, 0] - top.values[:, 1] > gap
    ours = torch.tensor(answered.answer)
    assert ours[clear].tolist() == top.indices[:, 0][clear].tolist()
    return int(clear.sum())


ONE_BY_ONE = {"chunk_tokens": 2048, "max_sequences": 1}
BATCHED = {"chunk_tokens": 2048}
IN_CHUNKS = {"chunk_tokens": 64}
ONE_BY_ONE_IN_CHUNKS = {"chunk_tokens": 64, "max_sequences": 1}


@pytest.mark.parametrize(
    ("settings", "part", "length"),
    [
        pytest.param(ONE_BY_ONE, 0, ANSWER, id="one by one"),
        pytest.param(IN_CHUNKS, 2, ANSWER, id="batched, in chunks"),
        pytest.param(ONE_BY_ONE, 0, LONG_ANSWER, id="one by one, long", marks=pytest.mark.long),
        pytest.param(BATCHED, 1, LONG_ANSWER, id="batched, long", marks=pytest.mark.long),
        pytest.param(IN_CHUNKS, 2, LONG_ANSWER, id="in chunks, long", marks=pytest.mark.long),
        pytest.param(
            ONE_BY_ONE_IN_CHUNKS,
            3,
            LONG_ANSWER,
            id="one by one, in chunks, long",
            marks=pytest.mark.long,
        ),
    ],
)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    model: Path,
    reference: Any,
    prompts: list[tuple[int, ...]],
    settings: dict[str, int],
    part: int,
    length: int,
) -> None:
    """Each way to compute takes its own quarter of the prompts; later ones find cached blocks.

    With short answers those three of them that are shortest.
    """
    asked = prompts[part::4] if length == LONG_ANSWER else sorted(prompts[part::4], key=len)[:3]
    for answered in answer(model, "float32", asked, length, **settings):
        expected = reference_logits(reference, answered)
        ours = answered.logits
        assert len(answered.answer) == length
        assert len(ours) >= length
        difference = (ours - expected[-len(ours) :]).abs().max().item()
        assert difference <= LOGITS_TOLERANCE
        assert check_tokens(answered, expected, LOGITS_TOLERANCE) > length // 2


def test_bfloat16_takes_the_same_tokens_where_the_choice_is_clear(
    model: Path, reference: Any, prompts: list[tuple[int, ...]]
) -> None:
    short = sorted(prompts, key=len)[:6]
    answers = answer(model, "bfloat16", short, 8)
    clear = [
        check_tokens(answered, reference_logits(reference, answered), CLEAR_GAP)
        for answered in answers
    ]
    assert sum(clear) > len(short)
