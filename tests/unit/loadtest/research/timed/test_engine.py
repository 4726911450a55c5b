from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.kv.kv_cache import allocate_plain
from engine.offline import generate
from loadtest.research.timed.engine import (
    CHUNK_TOKENS,
    FIRST_TOKEN_ID,
    TOKEN_IDS,
    TimedStepModel,
    build_timed_engine,
)
from loadtest.research.timed.model_folder import VOCABULARY, read_step_costs, write_model_folder
from planning.simulator.costs.step_model import FittedCosts
from router.text.tokenizer import Tokenizer
from tests.support.models import make_tiny_model
from worker.costs.step_costs import StepCosts
from worker.settings import WorkerSettings

pytestmark = pytest.mark.long

COSTS = StepCosts(prefill=(1.0, 0.01, 0.0), step=(2.0, 0.1, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("timed") / "model", COSTS)


@pytest.fixture
def model() -> TimedStepModel:
    return TimedStepModel(FittedCosts(COSTS), VOCABULARY)


@pytest.fixture
def engine(folder: Path, model: TimedStepModel) -> Engine:
    config = Config()
    pool = config.pools[0].model_copy(update={"kv_pool_mib": 1})
    settings = WorkerSettings(config, pool, "prefill-0", str(folder), "m", "", "", 1)
    return build_timed_engine(settings, model, allocate_plain)


def spec_of(prompt_tokens: int, name: str = "r", **sampling: object) -> SequenceSpec:
    fields = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling}
    return SequenceSpec(
        name,
        0,
        "router",
        tuple(range(prompt_tokens)),
        prompt_tokens,
        SamplingParams(**fields),  # type: ignore[arg-type]
    )


def test_a_mebibyte_holds_2048_blocks(engine: Engine) -> None:
    assert engine.pool.total == 2048
    assert engine.context_length == 2048 * 16


def test_the_context_may_be_bounded(folder: Path, model: TimedStepModel) -> None:
    config = Config(max_model_len=64)
    settings = WorkerSettings(config, config.pools[0], "prefill-0", str(folder), "m", "", "", 1)
    engine = build_timed_engine(settings, model, allocate_plain)
    assert engine.context_length == 64
    (answer,) = generate(engine, [spec_of(61)])
    assert len(answer.token_ids) == 3


def test_prompts_are_computed_in_chunks_and_answers_token_by_token(
    engine: Engine, model: TimedStepModel
) -> None:
    (answer,) = generate(engine, [spec_of(CHUNK_TOKENS + 10)])
    asked = [timing.asked_s for timing in model.take_timings()]
    chunks = [1e-3 + 1e-5 * CHUNK_TOKENS, 1e-3 + 1e-5 * 10]
    assert asked == pytest.approx([*chunks, *[2.1e-3] * 5])
    assert len(answer.token_ids) == 6


def test_an_answer_is_the_same_alone_in_a_batch_drawn_or_moved(engine: Engine) -> None:
    (alone,) = generate(engine, [spec_of(40)])
    both = generate(engine, [spec_of(7, "other"), spec_of(40, "again")])
    (drawn,) = generate(engine, [spec_of(40, temperature=1.0)])
    assert alone.token_ids == both[1].token_ids == drawn.token_ids
    begun = replace(spec_of(40), token_ids=(*range(40), *alone.token_ids[:3]))
    (moved,) = generate(engine, [begun])
    assert moved.token_ids == alone.token_ids


def test_no_other_engine_takes_the_folder_and_this_one_takes_no_other(
    folder: Path, tmp_path: Path
) -> None:
    assert read_step_costs(folder) == COSTS
    with pytest.raises(ConfigError, match="weight"):
        build_engine(EngineSettings(folder, device="cpu"))
    with pytest.raises(ConfigError, match="timed engine"):
        read_step_costs(make_tiny_model(tmp_path))


def test_a_router_reads_the_folder(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("x" * 100)) == 100
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.eos_ids == {VOCABULARY - 1}
    assert tokenizer.has_chat_template
    answers = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_IDS)
    assert tokenizer.encode(string.ascii_lowercase) == tuple(answers)
