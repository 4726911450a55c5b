"""A smaller model drafts in real steps of a tiny one: it changes no answer, whatever it knows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.request import GroupShape
from engine.build import build_engine
from engine.checkpoint.model_config import ModelConfig
from engine.engine import EngineSettings, warm_up
from engine.model.model import DecoderModel
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import PlanRow
from engine.speculation.model.length import Candidate, ModelDraftLength
from engine.speculation.model_drafter import FilledSlots
from tests.support.engine.draft_model import GREEDY, SAMPLINGS, SEEDED, Bench, some_tokens
from tests.support.engine.drafters import FixedLength
from tests.support.models import make_tiny_model

DRAFTS = ("itself", "another")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": make_tiny_model(root / "plain"),
        "plain-another": make_tiny_model(root / "plain-another", layers=1, seed=5),
        "fast": make_tiny_model(root / "fast", head_dim=16),
        "fast-another": make_tiny_model(root / "fast-another", layers=1, seed=5, head_dim=16),
    }


@pytest.fixture(scope="module")
def benches(folders: dict[str, Path]) -> dict[str, Bench]:
    """Torch in fp32, and the CPU's own decoder in bf16, each with itself and another to draft."""
    settings: dict[str, dict[str, Any]] = {"plain": {"dtype": "float32"}}
    if shutil.which("g++") is not None:
        settings["fast"] = {"deterministic": True}
    return {
        f"{kind}-{draft}": Bench(
            folders[kind], folders[kind if draft == "itself" else f"{kind}-another"], **flags
        )
        for kind, flags in settings.items()
        for draft in DRAFTS
    }


@pytest.fixture(params=[f"{kind}-{draft}" for kind in ("plain", "fast") for draft in DRAFTS])
def bench(request: pytest.FixtureRequest, benches: dict[str, Bench]) -> Bench:
    if request.param not in benches:
        pytest.skip("no C++ compiler")
    return benches[request.param]


@pytest.fixture(scope="module")
def itself(benches: dict[str, Bench]) -> Bench:
    """Where every draft is right."""
    return benches.get("fast-itself") or benches["plain-itself"]


PROMPTS = [some_tokens(count, seed=count) for count in (3, 16, 40, 31)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_answer(bench: Bench, name: str) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, FixedLength())
    assert found.tokens == expected.tokens
    assert found.drafted > 0


@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties"])
def test_a_model_guesses_itself(benches: dict[str, Bench], name: str) -> None:
    """It draws with the same noise, penalties and all."""
    for kind in ("plain-itself", "fast-itself"):
        if kind in benches:
            samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
            found = benches[kind].run(PROMPTS, samplings, FixedLength())
            assert found.accepted == found.drafted
            assert found.steps < 15


def test_another_model_seldom_does(benches: dict[str, Bench]) -> None:
    found = benches["plain-another"].run(PROMPTS, [GREEDY] * len(PROMPTS), FixedLength())
    assert found.accepted < found.drafted / 4


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_in_a_small_pool_with_two_plans_in_flight(bench: Bench, depth: int, prompts: bool) -> None:
    """Chunks, preemptions, prompts that share blocks, and the context's end."""
    asked = [*PROMPTS, PROMPTS[2] + [7, 8], some_tokens(60, 9)]
    samplings = [replace(SEEDED, seed=n, max_tokens=30 + n) for n in range(len(asked))]
    expected = bench.run(asked, samplings, context_length=80)
    found = bench.run(
        asked,
        samplings,
        FixedLength(prompts=prompts),
        depth=depth,
        blocks=9,
        chunk_tokens=17,
        context_length=80,
    )
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("prompts", [True, False])
def test_preempted_sequences_draft_again(bench: Bench, prompts: bool) -> None:
    asked = [some_tokens(8, n) for n in range(6)]
    samplings = [replace(SEEDED, seed=n, max_tokens=50) for n in range(6)]
    expected = bench.run(asked, samplings)
    length = FixedLength(prompts=prompts)
    found = bench.run(asked, samplings, length, depth=2, blocks=13)
    assert found.tokens == expected.tokens
    assert found.engine.scheduler.preemptions > 0
    if bench.draft_is_itself:
        assert found.accepted == found.drafted > 0


def test_choices_draft_over_shared_blocks(itself: Bench) -> None:
    samplings = [replace(SEEDED, seed=n) for n in range(len(PROMPTS))]
    expected = itself.run(PROMPTS, samplings, choices=3)
    found = itself.run(PROMPTS, samplings, FixedLength(), choices=3)
    assert found.tokens == expected.tokens
    assert found.accepted == found.drafted > 0


@pytest.mark.parametrize("prompts", [True, False])
def test_it_is_right_whether_it_has_kept_up_or_catches_up(itself: Bench, prompts: bool) -> None:
    """Every draft is right, so it has seen every token, and in its place."""
    length = FixedLength(prompts=prompts)
    found = itself.run([some_tokens(200, 1), *PROMPTS], [GREEDY] * 5, length, chunk_tokens=48)
    assert found.accepted == found.drafted > 0
    assert (max(length.backlogs) > 100) != prompts


def test_what_the_prefix_cache_finds_is_filled(itself: Bench) -> None:
    """Whichever process computed it, the drafter need not compute it again."""
    pool = BlockPool(64)
    prompt = some_tokens(100, 3)
    itself.run([prompt], [GREEDY], FixedLength(), pool=pool)
    length = FixedLength()
    found = itself.run([[*prompt, 5, 6]], [GREEDY], length, pool=pool)
    assert found.plans[0].rows[0].start == 96
    assert found.accepted == found.drafted > 0
    assert max(length.backlogs) <= 2


def test_a_conversation_goes_on(itself: Bench) -> None:
    """The end of an answer that was not taken in is taken in with the next turn."""
    pool = BlockPool(64)
    (turn,) = itself.run([some_tokens(60, 3)], [GREEDY], FixedLength(), pool=pool).sequences
    *_, last = pool.match(turn.full_hashes(16))
    group = itself.built.cache.drafter
    assert group is not None
    group.filled[last] = 13
    length = FixedLength()
    prompt = [*turn.token_ids, *some_tokens(70, 4)]
    found = itself.run([prompt], [GREEDY], length, pool=pool)
    assert found.plans[0].rows[0].start == 96
    assert found.accepted == found.drafted > 0
    assert max(length.backlogs) <= 2


def test_blocks_that_others_have_used_are_not_taken_for_filled(itself: Bench) -> None:
    """Rounds of a pool that fill every block, and rounds in which the drafter is behind."""
    pool = BlockPool(14)
    for number in range(6):
        length = FixedLength(prompts=number % 2 == 0)
        prompts = [some_tokens(50 + number, number), some_tokens(9 + 7 * number, 90 + number)]
        found = itself.run(prompts, [GREEDY] * 2, length, pool=pool)
        assert found.accepted == found.drafted > 0


class Whims(FixedLength):
    """Other lengths in every step, and prompts that are taken in or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def takes_prompt(self) -> bool:
        return self._random.random() < 0.5

    def wanted(self, batch: int, candidates: Sequence[Candidate]) -> list[int]:
        if self._random.random() < 0.4:
            return [0] * len(candidates)
        return [self._random.randint(0, min(6, candidate.most)) for candidate in candidates]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(0, 1 << 20),
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 30)), min_size=1, max_size=6),
    st.integers(7, 20),
    st.integers(5, 40),
    st.integers(1, 2),
)
def test_every_guess_is_right_whatever_happens_to_the_blocks(
    itself: Bench,
    seed: int,
    asked: list[tuple[int, int]],
    blocks: int,
    chunk_tokens: int,
    depth: int,
) -> None:
    """A model that guesses itself is wrong only where it has not seen what it should have."""
    prompts = [some_tokens(60, seed=9)[:count] for count, _ in asked]
    samplings = [replace(SEEDED, seed=n, max_tokens=most) for n, (_, most) in enumerate(asked)]
    limits: dict[str, Any] = {"blocks": blocks, "chunk_tokens": chunk_tokens, "depth": depth}
    found = itself.run(prompts, samplings, Whims(seed), **limits)
    assert found.tokens == itself.run(prompts, samplings).tokens
    assert found.accepted == found.drafted


def test_it_stops_at_the_end_of_its_own_context(folders: dict[str, Path], tmp_path: Path) -> None:
    short = make_tiny_model(tmp_path / "short", context=64)
    bench = Bench(folders["plain"], short, dtype="float32")
    prompts = [some_tokens(40, 1), some_tokens(100, 2)]
    expected = bench.run(prompts, [GREEDY] * 2)
    found = bench.run(prompts, [GREEDY] * 2, FixedLength())
    assert found.tokens == expected.tokens
    assert 0 < found.accepted == found.drafted


def test_with_lengths_by_what_is_measured(bench: Bench) -> None:
    asked = [PROMPTS[0], PROMPTS[2]]
    expected = bench.run(asked, [replace(GREEDY, max_tokens=100)] * 2)
    found = bench.run(asked, [replace(GREEDY, max_tokens=100)] * 2, ModelDraftLength())
    assert found.tokens == expected.tokens


def test_an_engine_is_built_with_it(folders: dict[str, Path]) -> None:
    settings = EngineSettings(
        folders["plain"],
        dtype="float32",
        device="cpu",
        threads=1,
        kv_pool_bytes=1 << 20,
        drafter="draft",
        draft_model=folders["plain-another"],
    )
    engine = build_engine(settings)
    assert engine.runner.drafter == "draft"
    assert engine.cache.geometry.drafter == GroupShape(1, 2, 8)
    assert list(engine.cache.groups) == ["target", "drafter"]
    assert (
        engine.cache.block_bytes > build_engine(replace(settings, drafter="none")).cache.block_bytes
    )
    warm_up(engine)


def test_its_tables_end_with_the_bounded_context(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = []

    class Watched(DecoderModel):
        def __init__(self, config: ModelConfig, *rest: Any) -> None:
            super().__init__(config, *rest)
            contexts.append([len(table) for table in self.ropes])

    for module in ("load", "build"):
        monkeypatch.setattr(f"engine.{module}.DecoderModel", Watched)
    settings = EngineSettings(
        folders["plain"],
        dtype="float32",
        device="cpu",
        threads=1,
        kv_pool_bytes=1 << 20,
        drafter="draft",
        draft_model=folders["plain-another"],
        max_model_len=48,
    )
    engine = build_engine(settings)
    assert engine.context_length == 48
    assert contexts == [[48], [48]]
    warm_up(engine)


def test_the_fingerprint_covers_it(folders: dict[str, Path]) -> None:
    settings = EngineSettings(
        folders["plain"], dtype="float32", device="cpu", threads=1, kv_pool_bytes=1 << 20
    )
    drafting = replace(settings, drafter="draft", draft_model=folders["plain-another"])
    names = [
        build_engine(each).fingerprint
        for each in (
            settings,
            replace(settings, drafter="ngram"),
            drafting,
            replace(drafting, draft_model=folders["plain"]),
        )
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_draft_model_must_have_the_models_tokens(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = EngineSettings(
        folders["plain"], dtype="float32", device="cpu", threads=1, kv_pool_bytes=1 << 20
    )
    with pytest.raises(ConfigError, match="needs a draft_model"):
        build_engine(replace(settings, drafter="draft"))
    other = make_tiny_model(tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace("<extra_260>", "<surprise>"))
    with pytest.raises(ConfigError, match=r"token 260 is '<surprise>', and the model has '<extra"):
        build_engine(replace(settings, drafter="draft", draft_model=other))
    path.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        build_engine(replace(settings, drafter="draft", draft_model=other))


def row_of(sequence_id: int, *blocks: int) -> PlanRow:
    return PlanRow(sequence_id, 0, 1, blocks, True)


def test_filled_slots_are_counted_to_the_first_gap(itself: Bench) -> None:
    group = itself.built.cache.drafter
    assert group is not None
    slots = FilledSlots(group)
    group.filled[:6] = torch.tensor([16, 7, 16, 16, 3, 0])
    assert slots.count(row_of(1, 0, 1, 2), 40) == 23
    assert slots.count(row_of(1, 0, 1, 2), 20) == 20
    assert slots.count(row_of(2, 0, 2, 3), 40) == 40
    # What was found of a sequence is not looked at again, until it is forgotten.
    assert slots.count(row_of(2, 1, 2, 3), 40) == 40
    slots.forget(2)
    assert slots.count(row_of(2, 1, 2, 3), 40) == 7
    slots.fill(row_of(1, 0, 1, 4), 23, 37)
    assert group.filled[:6].tolist() == [16, 16, 16, 16, 5, 0]
    slots.fill(row_of(3, 3, 5), 0, 18)
    assert group.filled[:6].tolist() == [16, 16, 16, 16, 5, 2]
