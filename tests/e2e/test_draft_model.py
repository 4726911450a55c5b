"""`baton serve --drafter draft`: handed-off prompts, guessed by a smaller model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client
from baton.request import SequenceSpec
from baton.rpc.convert import write_sampling
from baton.sampling_params import SamplingParams
from baton.v1.sampling_pb2 import SamplingParameters
from engine.build import build_engine
from engine.engine import EngineSettings
from engine.offline import generate
from tests.support.e2e.api import series
from tests.support.e2e.cluster import UpProcess
from tests.support.models import make_padded_model, make_tiny_model

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]

LAYERS = 60
"""The first one is all of the smaller model: that is right, and uses a small part."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
ASKED = [
    (tuple((count * 31 + n * n) % 250 for n in range(count)), sampling)
    for count in (13, 300)
    for sampling in (GREEDY, replace(GREEDY, temperature=0.8, seed=5))
]


def expected_of(folder: Path) -> list[tuple[int, ...]]:
    settings = EngineSettings(folder, device="cpu", kv_pool_bytes=64 << 20, deterministic=True)
    engine = build_engine(settings)
    specs = [SequenceSpec("", 0, "", prompt, len(prompt), s) for prompt, s in ASKED]
    return [generate(engine, [spec])[0].token_ids for spec in specs]


def message_of(params: SamplingParams) -> SamplingParameters:
    message = SamplingParameters()
    write_sampling(message, params)
    return message


def answers(up: UpProcess) -> list[tuple[int, ...]]:
    with Client(up.grpc) as client:
        return [
            tuple(
                token
                for piece in client.generate(token_ids=prompt, sampling=message_of(s))
                for token in piece.token_ids
            )
            for prompt, s in ASKED
        ]


@pytest.mark.long
def test_a_smaller_model_drafts(tmp_path: Path) -> None:
    """It pays, so that it drafts by what is measured; answers are those without it."""
    options: dict[str, Any] = {"head_dim": 16}
    large = make_padded_model(tmp_path / "large", layers=LAYERS, **options)
    small = make_tiny_model(tmp_path / "small", layers=1, **options)
    flags = ["--model", str(large), "--local-prefill", "never", "--deterministic"]
    with UpProcess(*flags, "--drafter", "draft", "--draft-model", str(small)) as up:
        up.wait_ready()
        assert answers(up) == expected_of(large)
        accepted = series(up, "baton_speculation_accepted_tokens_total", drafter="draft")
        assert accepted > 100
        assert series(up, "baton_handoffs_total", outcome="ok") >= len(ASKED)
        up.terminate()
        assert up.wait() == 0, up.text
