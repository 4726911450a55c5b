"""The model of the serving phase: one that every part can load, and whose answers need its KV."""

from __future__ import annotations

import math
import random
from pathlib import Path

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import generate
from loadtest.gpu.common.models import tensor_shapes
from loadtest.gpu.serving.phase import BILLION, TINY, write_model
from router.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answer(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    spec = SequenceSpec("r", 0, "router", prompt, len(prompt), GREEDY)
    (output,) = generate(engine, [spec])
    return output.token_ids


def test_answers_depend_on_the_beginning_of_their_prompt(tmp_path: Path) -> None:
    write_model(tmp_path, TINY, "cpu")
    settings = EngineSettings(
        tmp_path, dtype="float32", device="cpu", threads=1, kv_pool_bytes=1 << 20
    )
    engine = build_engine(settings)
    dice = random.Random(0)
    prompts = [tuple(dice.choices(range(256), k=100)) for _ in range(8)]
    answers = {answer(engine, prompt) for prompt in prompts}
    assert len(answers) == len(prompts)
    # Whatever follows, other KV of the first block alone gives other tokens.
    others = [tuple(dice.choices(range(256), k=16)) + prompt[16:] for prompt in prompts]
    changed = sum(
        answer(engine, a) != answer(engine, b) for a, b in zip(prompts, others, strict=True)
    )
    assert changed >= 6


def test_a_byte_of_text_is_a_token(tmp_path: Path) -> None:
    write_model(tmp_path, TINY, "cpu")
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("any text")
    assert len(ids) == len("any text")
    assert max(ids) < 256


def test_the_large_one_has_about_a_billion_weights() -> None:
    weights = sum(math.prod(shape) for _, shape in tensor_shapes(BILLION))
    assert 1.0e9 < weights < 1.2e9
