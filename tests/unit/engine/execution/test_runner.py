"""The runner's plans, and the engine that is put together around it, on a tiny model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.errors import ConfigError
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, warm_up
from engine.execution.runner import ModelRunner
from engine.gpu.runner import GpuRunner
from engine.offline import OfflineOutput, generate
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from engine.scheduling.sequence import SCORED_TOKENS
from tests.kernels.gpu.torch_steps import TorchSteps
from tests.support.models import EOS, VOCAB, make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4
"""Of the tiny model in fp32: layers, K and V, KV heads, head dim, slots, bytes."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def build(folder: Path, **changes: Any) -> Engine:
    settings = EngineSettings(
        folder, dtype="float32", device="cpu", threads=1, kv_pool_bytes=64 * BLOCK_BYTES
    )
    return build_engine(replace(settings, **changes))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build(folder)


@pytest.fixture
def runner(engine: Engine) -> ModelRunner:
    """On the shared engine's model and cache, with no sequences."""
    return ModelRunner(engine.runner.model, engine.cache, engine.runner.device)


@pytest.fixture(scope="module")
def likeliest(folder: Path) -> Callable[[list[int]], int]:
    """What transformers would take next; sure of itself on this model."""
    reference: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def next_token(tokens: list[int]) -> int:
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-3, "a near tie: take another prompt"
        return int(logits.argmax())

    return next_token


def some_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EOS - 1, (count,), generator=generator).tolist()


def new(sequence_id: int, tokens: list[int], **changes: Any) -> NewSequence:
    sampling = replace(GREEDY, **changes)
    return NewSequence(sequence_id, tuple(tokens), len(tokens), sampling, (EOS,))


def plan(*rows: PlanRow, arrivals: tuple[NewSequence, ...] = (), step: int = 0) -> StepPlan:
    return StepPlan(step, arrivals, (), rows)


def test_a_prompt_and_what_follows(
    runner: ModelRunner, likeliest: Callable[[list[int]], int]
) -> None:
    """The runner knows what it sampled: later plans bring no tokens."""
    tokens = some_tokens(20)
    table = (5, 3, 9)
    result = runner.run(plan(PlanRow(1, 0, 20, table, True), arrivals=(new(1, tokens),), step=7))
    assert result.step == 7
    assert result.seconds > 0
    for position in range(20, 40):
        expected = likeliest(tokens)
        assert result.token_ids == ((expected,),)
        tokens.append(expected)
        result = runner.run(plan(PlanRow(1, position, 1, table, True)))


def test_chunks_sample_at_the_end_alone(
    runner: ModelRunner, likeliest: Callable[[list[int]], int]
) -> None:
    tokens = some_tokens(30, seed=1)
    table = (0, 1)
    first = runner.run(plan(PlanRow(1, 0, 11, table, False), arrivals=(new(1, tokens),)))
    second = runner.run(plan(PlanRow(1, 11, 1, table, False)))
    third = runner.run(plan(PlanRow(1, 12, 18, table, True)))
    assert (first.token_ids, second.token_ids) == (((),), ((),))
    assert third.token_ids == ((likeliest(tokens),),)


def test_results_stand_in_the_order_of_the_rows(
    runner: ModelRunner, likeliest: Callable[[list[int]], int]
) -> None:
    """Rows that sample stand between rows that do not."""
    prompts = [some_tokens(count, seed=count) for count in (5, 33, 1, 40, 16)]
    tables = [tuple(range(4 * n, 4 * n + 4)) for n in range(5)]
    expected = [likeliest(tokens) for tokens in prompts]
    rows = (
        PlanRow(3, 0, 40, tables[3], True),
        PlanRow(1, 0, 20, tables[1], False),
        PlanRow(0, 0, 5, tables[0], True),
        PlanRow(4, 0, 1, tables[4], False),
        PlanRow(2, 0, 1, tables[2], True),
    )
    arrivals = tuple(new(n, tokens) for n, tokens in enumerate(prompts))
    result = runner.run(plan(*rows, arrivals=arrivals))
    assert result.token_ids == ((expected[3],), (), (expected[0],), (), (expected[2],))
    after = prompts[0] + [expected[0]]
    rest = (
        PlanRow(0, 5, 1, tables[0], True),
        PlanRow(4, 1, 15, tables[4], True),
        PlanRow(1, 20, 13, tables[1], True),
    )
    result = runner.run(plan(*rest))
    assert result.token_ids == ((likeliest(after),), (expected[4],), (expected[1],))


def test_sequences_are_dropped_before_new_ones_come(
    runner: ModelRunner, likeliest: Callable[[list[int]], int]
) -> None:
    """A preempted sequence comes back under its number, with what it has generated."""
    tokens = some_tokens(9)
    runner.run(plan(PlanRow(1, 0, 9, (0,), True), arrivals=(new(1, tokens),)))
    longer = [*tokens, likeliest(tokens)]
    back = NewSequence(1, tuple(longer), 9, GREEDY, (EOS,))
    result = runner.run(StepPlan(1, (back,), (1,), (PlanRow(1, 0, 10, (4,), True),)))
    assert result.token_ids == ((likeliest(longer),),)
    runner.forget(1)
    assert runner.run(plan(PlanRow(1, 10, 1, (4,), True))).left_out == (0,)


def test_a_step_behind_a_failed_one_computes_nothing(runner: ModelRunner) -> None:
    """It was planned for a token that the failed one never drew."""
    tokens = some_tokens(9)
    runner.run(plan(PlanRow(1, 0, 9, (0,), True), arrivals=(new(1, tokens),)))
    result = runner.run(plan(PlanRow(1, 10, 1, (0,), True)))
    assert (result.token_ids, result.left_out) == (((),), (0,))


def test_the_border_between_prompt_and_answer_is_kept(runner: ModelRunner) -> None:
    """A moved sequence: penalties and min_tokens count its answer, not its prompt."""
    tokens = some_tokens(12)
    sampling = replace(GREEDY, min_tokens=3, logit_bias=((EOS, 100.0), (7, 50.0)))

    def drawn(prompt_length: int, sampling: SamplingParams) -> int:
        runner.forget(1)
        moved = NewSequence(1, tuple(tokens), prompt_length, sampling, (EOS,))
        result = runner.run(plan(PlanRow(1, 0, 12, (0,), True), arrivals=(moved,)))
        return result.token_ids[0][0]

    runner.run(plan(PlanRow(1, 0, 12, (0,), True), arrivals=(new(1, tokens),)))
    assert drawn(12, sampling) == 7
    assert drawn(10, sampling) == 7
    assert drawn(9, sampling) == EOS
    tokens[10] = 7
    penalised = replace(sampling, frequency_penalty=2.0, logit_bias=((7, 8.0),), min_tokens=0)
    unpenalised = drawn(12, replace(penalised, frequency_penalty=0.0))
    assert drawn(12, penalised) == unpenalised


def test_the_same_seed_draws_the_same_in_any_company(runner: ModelRunner) -> None:
    tokens = some_tokens(10)
    warm = {"temperature": 1.0, "seed": 99}
    row = PlanRow(1, 0, 10, (0,), True)
    alone = runner.run(plan(row, arrivals=(new(1, tokens, **warm),))).token_ids[0]
    arrivals = (new(2, some_tokens(40, seed=3), temperature=2.0), new(3, tokens, **warm))
    rows = (PlanRow(2, 0, 40, (1, 2, 3), True), PlanRow(3, 0, 10, (4,), True))
    assert runner.run(plan(*rows, arrivals=arrivals)).token_ids[1] == alone


def answers(engine: Engine, **changes: Any) -> list[OfflineOutput]:
    """What five prompts of several lengths get."""
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
    prompts = [tuple(some_tokens(count, seed=count)) for count in (1, 15, 16, 17, 70)]
    specs = [SequenceSpec("", 0, "", p, len(p), replace(sampling, **changes)) for p in prompts]
    return generate(engine, specs)


def on_overlapping_steps(engine: Engine) -> Engine:
    """The same engine with a GPU's runner, whose step model is torch."""
    steps: Any = TorchSteps(engine.runner.model, 8)
    return replace(engine, runner=GpuRunner(steps, engine.cache, engine.runner.device))


@pytest.mark.parametrize("runs", [lambda engine: engine, on_overlapping_steps], ids=["cpu", "gpu"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("length", "choices"),
    [(SCORED_TOKENS + 2, 2), (SCORED_TOKENS + 3, 3), (2 * SCORED_TOKENS + 4, 4)],
)
def test_a_scored_prompt_changes_none_of_its_choices(
    folder: Path, runs: Callable[[Engine], Engine], temperature: float, length: int, choices: int
) -> None:
    """The prompt's last step scores as many tokens as it starts further choices."""
    prompt = tuple(some_tokens(length, seed=length))
    plain = replace(GREEDY, temperature=temperature, seed=5, max_tokens=4, ignore_eos=True)
    found = []
    for sampling in (plain, replace(plain, prompt_logprobs=1)):
        spec = SequenceSpec("", 0, "", prompt, length, sampling, choices=choices)
        found.append(generate(runs(build(folder)), [spec]))
    assert [one.token_ids for one in found[1]] == [one.token_ids for one in found[0]]
    assert [len(one.prompt_logprobs) for one in found[1]] == [length - 1] + [0] * (choices - 1)


@pytest.mark.parametrize("runs", [lambda engine: engine, on_overlapping_steps], ids=["cpu", "gpu"])
@pytest.mark.parametrize("scored", [1, 2, 5])
def test_a_scored_prompt_changes_no_other_request_of_its_step(
    folder: Path, runs: Callable[[Engine], Engine], scored: int
) -> None:
    """One prompt scores k tokens, the next starts k + 1 choices, and a third one decodes."""
    warm = replace(GREEDY, temperature=0.8, seed=5, max_tokens=4, ignore_eos=True)
    others = [
        SequenceSpec("b", 0, "", tuple(some_tokens(9, seed=1)), 9, warm, choices=scored + 1),
        SequenceSpec("c", 0, "", tuple(some_tokens(5, seed=2)), 5, replace(warm, temperature=0.0)),
    ]
    expected = generate(runs(build(folder)), others)
    prompt, sampling = tuple(some_tokens(scored + 1)), replace(warm, prompt_logprobs=0)
    first = SequenceSpec("a", 0, "", prompt, scored + 1, sampling)
    found = generate(runs(build(folder)), [first, *others])
    assert len(found[0].prompt_logprobs) == scored
    assert found[1:] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1, "kv_pool_bytes": 300 * BLOCK_BYTES // 16},
        {"block_size": 32},
        {"chunk_tokens": 7},
        {"max_sequences": 1},
        {"max_sequences": 2, "chunk_tokens": 20},
        {"kv_pool_bytes": 9 * BLOCK_BYTES},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_setting_changes_an_answer(
    engine: Engine, folder: Path, settings: dict[str, int], temperature: float
) -> None:
    """Chunks, batches, block sizes, preemption: seeded answers are the same, cold and warm."""
    expected = answers(engine, temperature=temperature)
    assert [len(answer.token_ids) for answer in expected] == [24] * 5
    other = build(folder, **settings)
    assert answers(other, temperature=temperature) == expected
    assert answers(other, temperature=temperature) == expected, "from a warm cache"
    if settings.get("kv_pool_bytes") == 9 * BLOCK_BYTES:
        assert other.scheduler.preemptions > 0


def test_limits_of_an_engine(folder: Path) -> None:
    engine = build(folder)
    assert engine.pool.total == 64
    assert engine.cache.block_bytes == BLOCK_BYTES
    assert engine.scheduler.limits.chunk_tokens == 512
    assert engine.context_length == 512
    assert engine.cache.geometry.kv_dtype == "float32"
    small = build(folder, kv_pool_bytes=4 * BLOCK_BYTES, chunk_tokens=48, dtype="bfloat16")
    assert small.pool.total == 8
    assert small.context_length == 8 * 16, "no sequence can be longer than the pool"
    assert small.scheduler.limits.chunk_tokens == 48
    assert small.fingerprint != engine.fingerprint


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_pool_that_is_too_small(folder: Path, blocks: int) -> None:
    with pytest.raises(ConfigError, match="kv_pool_mib"):
        build(folder, kv_pool_bytes=(blocks + 1) * BLOCK_BYTES - 1)


@pytest.mark.parametrize("dtype", ["float", "int8", "float64", "uint8", "complex64", "Tensor", ""])
def test_a_type_that_no_model_is_served_in(folder: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match="bfloat16, float32, float16"):
        build(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "meta", "gpu", "cpu:x", ""])
def test_a_device_that_is_not_there(folder: Path, device: str) -> None:
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match="device"):
        build(folder, device=device)


def test_a_folder_that_is_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        build(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_pool_bytes": 2 * BLOCK_BYTES},
        {"chunk_tokens": 1},
        {"block_size": 1, "kv_pool_bytes": 2 * BLOCK_BYTES // 16},
    ],
    ids=str,
)
def test_warming_up_leaves_nothing_behind(
    engine: Engine, folder: Path, settings: dict[str, int]
) -> None:
    warmed = build(folder, **settings)
    warm_up(warmed)
    warm_up(warmed)
    assert warmed.scheduler.is_idle()
    assert warmed.pool.available == warmed.pool.total
    assert not warmed.runner._known
    if not settings:
        assert answers(warmed) == answers(engine)


def test_the_vocabulary_is_the_models(engine: Engine) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=100, ignore_eos=True)
    [answer] = generate(engine, [SequenceSpec("", 0, "", (VOCAB - 1,), 1, sampling)])
    assert len(set(answer.token_ids)) > 20
    assert max(answer.token_ids) < VOCAB


def test_a_sequence_that_was_not_learned_fails_its_steps_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not know the sequence is asked to drop it."""
    learn = runner._learn
    failed: list[NewSequence] = []

    def fail_once(new: NewSequence) -> None:
        if new.sequence_id == 2 and not failed:
            failed.append(new)
            raise MemoryError
        learn(new)

    monkeypatch.setattr(runner, "_learn", fail_once)
    prompts = {n: NewSequence(n, (1, 2, 3, n), 4, GREEDY, ()) for n in range(1, 6)}
    rows = {n: PlanRow(n, 0, 4, (n,), True) for n in prompts}
    with pytest.raises(MemoryError):
        runner.run(
            StepPlan(1, tuple(prompts[n] for n in (1, 2, 3)), (), tuple(rows[n] for n in (1, 2, 3)))
        )
    assert runner.run(StepPlan(2, (), (), (PlanRow(3, 4, 1, (3,), True),))).left_out == (0,)
    plan = StepPlan(3, (prompts[4], prompts[5]), (1, 2, 3), (rows[4], rows[5]))
    assert len(runner.run(plan).token_ids) == 2
    assert sorted(runner._known) == [4, 5]
