"""Shared by the tests of handoff and by other tests."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import generate

BLOCK = 16


ANSWER = 2 * BLOCK + 3


def reference(model: Path) -> Engine:
    """One process doing both, with nothing cached."""
    return build_engine(
        EngineSettings(model, "float32", device="cpu", kv_pool_bytes=8 << 20, threads=1)
    )


def local_answer(model: Path, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    spec = SequenceSpec("local", 0, "", prompt, len(prompt), sampling)
    return generate(reference(model), [spec])[0].token_ids


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=1234, max_tokens=ANSWER, ignore_eos=True),
}
