"""A row's bits depend on its sequence alone: not on the batch, nor on how its tokens were computed.

In bf16 with the CPU's own kernels, for weights and KV of every kind.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, Unavailable
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence
from engine.execution.runner import ModelRunner
from engine.offline import generate
from engine.sampling.step import StepInput, StepModel, StepOutput
from engine.scheduling import sequence as engine_sequence
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.speculation.speculation import MAX_DRAFT_TOKENS, Speculation
from kvtransfer.memory.memory import HostMemory
from tests.support.engine.drafters import Oracle, WholeDrafts
from tests.support.mini_cluster import mini_cluster
from tests.support.models import VOCAB, make_tiny_model

BLOCK = 16
PROMPT = 530
"""Longer than the longest chunk, and five runs of the attention's 128 keys."""
ANSWER = 12
BLOCKS = 256
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=ANSWER, ignore_eos=True)
KINDS = [("none", "auto"), ("none", "int8"), ("int8", "fp8"), ("int4", "int8"), ("fp8", "auto")]
"""Quantization of the weights, and the KV type."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class RecordingModel:
    """Keeps the logits of every token that it computes, by sequence and position."""

    def __init__(self, inner: StepModel) -> None:
        self.inner = inner
        self.seen: dict[int, dict[int, list[torch.Tensor]]] = {}

    def run(self, step: StepInput) -> StepOutput:
        everything = replace(step, outputs=list(range(len(step.token_ids))), greedy=False)
        logits = self.inner.run(everything).logits
        assert logits is not None
        at = 0
        for row in step.rows:
            kept = self.seen.setdefault(row.sequence_id, {})
            for position in range(row.start, row.start + row.count):
                kept.setdefault(position, []).append(logits[at].clone())
                at += 1
        return StepOutput(None, logits[step.outputs])

    @property
    def layers_done(self) -> int:
        return self.inner.layers_done

    def clear_progress(self) -> None:
        self.inner.clear_progress()

    def use_threads(self, threads: int) -> None:
        self.inner.use_threads(threads)


class Bench:
    """An engine whose scheduler is exchanged for each run, and the prompt's logits when alone."""

    def __init__(self, model: Path, quantization: str = "none", kv_dtype: str = "auto") -> None:
        built = build_engine(
            EngineSettings(
                model,
                device="cpu",
                threads=1,
                kv_pool_bytes=BLOCKS << 14,
                quantization=quantization,
                kv_dtype=kv_dtype,
                deterministic=True,
            )
        )
        assert built.pool.total >= BLOCKS
        self._built = built
        self._inner = built.runner.model
        self.prompt = some_tokens(PROMPT, 0)
        engine = self.engine()
        target = self.sequence(engine, 0, self.prompt, SEEDED)
        run(engine, [target])
        self.tokens = target.token_ids
        self.logits = recorded(engine).seen[0]
        assert len(self.logits) == PROMPT + ANSWER - 1
        every = torch.stack([found[0] for found in self.logits.values()])
        assert every.std() > 0.3, "logits that are all alike would prove nothing"

    def engine(
        self,
        chunk_tokens: int = 512,
        max_sequences: int = 64,
        blocks: int = BLOCKS,
        speculation: Speculation | None = None,
    ) -> Engine:
        """The same model and memory with nothing cached and other limits."""
        runner = self._built.runner
        model = RecordingModel(self._inner)
        fresh = ModelRunner(model, runner.cache, runner.device, speculation=speculation)
        limits = replace(
            self._built.scheduler.limits,
            chunk_tokens=chunk_tokens,
            chunk_keys=0,
            max_sequences=max_sequences,
            draft_tokens=MAX_DRAFT_TOKENS if speculation else 0,
        )
        pool = BlockPool(blocks)
        return replace(self._built, runner=fresh, pool=pool, scheduler=Scheduler(pool, limits))

    def sequence(
        self,
        engine: Engine,
        number: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
    ) -> engine_sequence.Sequence:
        spec = SequenceSpec(
            f"{number}", 0, "", tuple(tokens), len(tokens), sampling, priority=priority
        )
        return make_sequence(engine, number, spec)

    def check(self, engine: Engine, target: engine_sequence.Sequence) -> None:
        """Every token of the target has the bits that it has when it is alone."""
        assert target.token_ids == self.tokens
        seen = recorded(engine).seen[target.sequence_id]
        assert PROMPT + ANSWER - 2 in seen
        for position, found in seen.items():
            for logits in found:
                assert torch.equal(logits, self.logits[position][0]), position


def recorded(engine: Engine) -> RecordingModel:
    model = engine.runner.model
    assert isinstance(model, RecordingModel)
    return model


def run(engine: Engine, sequences: list[engine_sequence.Sequence], every: int = 0) -> None:
    """Run all to their ends; one joins every given number of steps, all at once for 0."""
    coming = list(sequences)
    steps = 0
    while coming or not engine.scheduler.is_idle():
        while coming and (not every or steps % every == 0 or engine.scheduler.is_idle()):
            engine.scheduler.add(coming.pop(0))
            if every:
                break
        plan = engine.scheduler.schedule()
        if plan is not None:
            engine.scheduler.complete(plan, engine.runner.run(plan))
        steps += 1
    engine.pool.check()


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (count,), generator=generator).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=1024, head_dim=16)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def bench(request: pytest.FixtureRequest, model: Path) -> Bench:
    return Bench(model, *request.param)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 128, 511, 512])
def test_chunks_of_every_size(bench: Bench, chunk: int) -> None:
    engine = bench.engine(chunk, max_sequences=1)
    target = bench.sequence(engine, 0, bench.prompt, SEEDED)
    run(engine, [target])
    bench.check(engine, target)


def test_prefix_hits_at_every_block(bench: Bench) -> None:
    once = replace(SEEDED, max_tokens=1)
    for blocks in range(1, PROMPT // BLOCK + 1):
        engine = bench.engine()
        run(engine, [bench.sequence(engine, 1, bench.prompt[: blocks * BLOCK], once)])
        target = bench.sequence(engine, 0, bench.prompt, SEEDED)
        run(engine, [target])
        assert min(recorded(engine).seen[0]) == blocks * BLOCK
        bench.check(engine, target)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    strangers=st.integers(1, 31),
    place=st.floats(0, 1),
    chunk=st.integers(32, 512),
    every=st.integers(0, 4),
    shared=st.integers(0, PROMPT // BLOCK),
    seed=st.integers(0, 1 << 16),
)
def test_strangers_in_the_batch(
    bench: Bench, strangers: int, place: float, chunk: int, every: int, shared: int, seed: int
) -> None:
    """2 to 32 sequences that come and go; some begin with blocks of the same prompt."""
    chance = random.Random(seed)
    engine = bench.engine(chunk)
    sequences = []
    for number in range(1, strangers + 1):
        start = bench.prompt[: shared * BLOCK] if number % 3 == 0 else []
        tokens = start + some_tokens(chance.randint(1, 60), seed + number)
        sampling = SamplingParams(
            temperature=number % 2, seed=number, max_tokens=chance.randint(1, 20), ignore_eos=True
        )
        sequences.append(bench.sequence(engine, number, tokens, sampling))
    target = bench.sequence(engine, 0, bench.prompt, SEEDED)
    sequences.insert(round(place * strangers), target)
    run(engine, sequences, every)
    bench.check(engine, target)


@pytest.mark.parametrize("strangers", [0, 3, 12])
def test_drafts_that_are_right(bench: Bench, strangers: int) -> None:
    """Up to 11 of them in a step, which so has rows of 1 to 12 tokens."""
    sequences = [
        bench.sequence(bench.engine(), n, some_tokens(20 + n, n), replace(SEEDED, seed=n))
        for n in range(1, strangers + 1)
    ]
    run(bench.engine(), sequences)
    answers = {sequence.sequence_id: sequence.token_ids for sequence in sequences}
    oracle = Oracle(0.0, VOCAB, {**answers, 0: bench.tokens})
    engine = bench.engine(speculation=Speculation(oracle, WholeDrafts()))
    target = bench.sequence(engine, 0, bench.prompt, SEEDED)
    others = [
        bench.sequence(engine, n, sequence.spec.token_ids, sequence.spec.sampling)
        for n, sequence in enumerate(sequences, 1)
    ]
    run(engine, [*others, target])
    assert [other.token_ids for other in others] == list(answers.values())
    bench.check(engine, target)


def test_preempted_and_computed_again(bench: Bench) -> None:
    """The pool is so small that sequences which decode push the least important one out."""
    engine = bench.engine(chunk_tokens=64, blocks=-(-(PROMPT + ANSWER) // BLOCK) + 4)
    long = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    strangers = [bench.sequence(engine, n, some_tokens(13, n), long) for n in (1, 2)]
    target = bench.sequence(engine, 0, bench.prompt, SEEDED, priority=1)
    run(engine, [*strangers, target], every=1)
    assert engine.scheduler.preemptions
    assert max(map(len, recorded(engine).seen[0].values())) > 1, "nothing was computed again"
    bench.check(engine, target)


@pytest.mark.parametrize("computed", [1, 15, 16, 17, 300, PROMPT])
def test_a_handoff_between_two_engines(bench: Bench, model: Path, computed: int) -> None:
    """One computes the KV of the first tokens, its blocks' bytes move, the other goes on."""
    sender = bench.engine()
    first = bench.sequence(sender, 0, bench.prompt[:computed], replace(SEEDED, max_tokens=1))
    sender.scheduler.add(first)
    plan = sender.scheduler.schedule()
    while plan is not None:
        result = sender.runner.run(plan)
        table = plan.rows[0].block_table
        sender.scheduler.complete(plan, result)
        plan = sender.scheduler.schedule()
    source = HostMemory(sender.cache.bytes.numpy())
    moved = [memoryview(bytearray(source.block_bytes)) for _ in table]
    for block, data in zip(table, moved, strict=True):
        source.read(block, 0, data)
    for block in table:
        sender.cache.block(block).fill_(255)
    receiver = bench.engine(chunk_tokens=100)
    spare, taken = receiver.pool.allocate(7), receiver.pool.allocate(len(table))
    target = bench.sequence(receiver, 0, bench.prompt, SEEDED)
    memory = HostMemory(receiver.cache.bytes.numpy())
    for block, data in zip(taken, moved, strict=True):
        memory.write(block, 0, data)
    receiver.scheduler.add_computed(target, taken, min(computed, PROMPT - 1))
    while (plan := receiver.scheduler.schedule()) is not None:
        receiver.scheduler.complete(plan, receiver.runner.run(plan))
    receiver.pool.release(spare)
    receiver.pool.check()
    bench.check(receiver, target)


@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[2]], ids=str)
async def test_a_cluster_answers_as_one_engine_does(
    model: Path, redis_url: str, kinds: tuple[str, str]
) -> None:
    """Requests all at once, through real handoffs, cold and warm."""
    quantization, kv_dtype = kinds
    flags: dict[str, Any] = {
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "deterministic": True,
    }
    engine = build_engine(
        EngineSettings(model, device="cpu", threads=1, kv_pool_bytes=4 << 20, **flags)
    )
    prompts = [tuple(some_tokens(length, length)) for length in (1, 16, 17, 40, 64, 100, 333)]
    samplings = [replace(SEEDED, seed=n, temperature=n % 2) for n in range(len(prompts))]
    expected = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine.pool.drop_cache()
        spec = SequenceSpec("alone", 0, "", prompt, len(prompt), sampling)
        expected.append(generate(engine, [spec])[0].token_ids)
    changes: dict[str, Any] = {"dtype": "bfloat16", "kv_pool_mib": 8, "chunk_tokens": 64}
    async with mini_cluster(model, redis_url, **changes, **flags) as cluster:
        assert {w.record.fingerprint for w in cluster.workers.values() if w.record} == {
            engine.fingerprint
        }
        for _ in ("cold", "warm"):
            answers = await asyncio.gather(
                *(cluster.answer(p, s) for p, s in zip(prompts, samplings, strict=True))
            )
            assert [answer.token_ids for answer in answers] == expected
        await cluster.until_idle()


@pytest.mark.parametrize(
    "change",
    [
        {"deterministic": True},
        pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.long),
        pytest.param({"quantization": "int8"}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_workers_of_another_kind_share_no_kv(
    model: Path, redis_url: str, change: dict[str, object]
) -> None:
    async with mini_cluster(model, redis_url, dtype="bfloat16", kv_pool_mib=8) as cluster:
        pool = next(pool for pool in cluster.config.pools if pool.role == "prefill")
        await cluster.workers["prefill-0"].stop()
        cluster.config = cluster.config.model_copy(update=change)
        await cluster.start_worker(pool, "prefill-0")
        await cluster.until(lambda: cluster.dispatcher.workers.up("prefill"))
        assert cluster.dispatcher.health() == ("down", "no prefill worker is ready")
        with pytest.raises(Unavailable, match="no prefill worker is ready"):
            await cluster.answer(tuple(some_tokens(20, 0)), SEEDED)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_types_that_cannot_keep_the_promise_are_refused(model: Path, dtype: str) -> None:
    settings = EngineSettings(model, dtype, "cpu", kv_pool_bytes=4 << 20, deterministic=True)
    with pytest.raises(ConfigError, match=f"dtype is {dtype}.*bfloat16"):
        build_engine(settings)


def test_shapes_that_torch_computes_are_refused(model: Path, tmp_path: Path) -> None:
    settings = EngineSettings(model, device="cpu", kv_pool_bytes=4 << 20, deterministic=True)
    with pytest.raises(ConfigError, match="block_size"):
        build_engine(replace(settings, block_size=8))
    narrow = make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="multiple of 16"):
        build_engine(replace(settings, model_path=narrow))
