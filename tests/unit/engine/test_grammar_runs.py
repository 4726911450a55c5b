"""Answers that follow grammars, on a tiny model: what they are, and that they always end."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.grammar import Grammar, GrammarKind
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence
from engine.execution.grammar_rows import GrammarRows
from engine.execution.runner import ModelRunner
from engine.offline import OfflineOutput, compile_grammar, generate
from engine.sampling.grammar_state import unpack
from engine.sampling.sampling import SampleRow, sample
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import NewSequence
from engine.scheduling.scheduler import Scheduler
from tests.support.models import EOS, VOCAB, make_tiny_model

KIB = 1 << 10
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["one", "two", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(folder: Path, **changes: Any) -> Engine:
    plain = EngineSettings(
        folder, dtype="float32", device="cpu", threads=1, kv_pool_bytes=512 * KIB
    )
    return build_engine(replace(plain, **changes))


@pytest.fixture(scope="module", params=["torch", "C++"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Both ways in which a CPU computes and draws."""
    if request.param == "torch":
        folder = make_tiny_model(tmp_path_factory.mktemp("torch"))
        built = build(folder)
        built.runner._sample = sample
        return built
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = make_tiny_model(tmp_path_factory.mktemp("cpp"), head_dim=16)
    return build(folder, dtype="bfloat16")


@pytest.fixture
def engine(built: Engine) -> Engine:
    """With nothing cached: tests share the memory of its blocks, and what one of them has left in
    it another may have written over."""
    return fresh(built)


def fresh(engine: Engine, blocks: int = 0, **limits: Any) -> Engine:
    """The same model with another scheduler, and with a runner that knows no sequence."""
    old = engine.runner
    runner = ModelRunner(old.model, old.cache, old.device, engine.config.vocab_size)
    runner._sample = old._sample
    pool = BlockPool(blocks or engine.pool.total)
    scheduler = Scheduler(pool, replace(engine.scheduler.limits, **limits))
    return replace(engine, runner=runner, pool=pool, scheduler=scheduler)


def json_grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def spec_of(grammar: Grammar | None, name: str = "r", **sampling: Any) -> SequenceSpec:
    prompt = tuple(random.Random(name).randrange(200) for _ in range(20))
    given_ = {"max_tokens": 300, "grammar": grammar, **sampling}
    return SequenceSpec(name, 0, "t", prompt, len(prompt), SamplingParams(**given_))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_tiny_model(tmp_path_factory.mktemp("words"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def text_of(output: OfflineOutput, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(list(output.token_ids))
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_answers_match_their_schema(
    engine: Engine, tokenizer: Tokenizer, temperature: float
) -> None:
    specs = [
        spec_of(json_grammar(PERSON), f"r{n}", temperature=temperature, seed=n) for n in range(8)
    ]
    outputs = generate(engine, specs)
    answers = [text_of(output, tokenizer) for output in outputs]
    for output, answer in zip(outputs, answers, strict=True):
        assert output.finish_reason is FinishReason.STOP
        assert output.token_ids[-1] == EOS
        jsonschema.validate(json.loads(answer), PERSON)
    assert len(set(answers)) > (1 if temperature == 0 else 6)


def test_a_grammar_changes_nothing_for_its_neighbours(engine: Engine) -> None:
    """Nor do they for it: alone, and together in one batch."""
    specs = [
        spec_of(grammar, f"r{n}", temperature=1.0, seed=n, max_tokens=60)
        for n, grammar in enumerate([None, json_grammar(PERSON), None, regex("(ab|cd){20,60}")])
    ]
    alone = [generate(engine, [spec])[0] for spec in specs]
    assert generate(engine, specs) == alone


def test_a_text_that_is_cut_ends_for_its_length(engine: Engine) -> None:
    (output,) = generate(engine, [spec_of(regex("a{50}"), max_tokens=20)])
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_only_text_is_said_whatever_the_parameters(
    engine: Engine, tokenizer: Tokenizer, temperature: float
) -> None:
    """Biases and penalties choose among what is allowed, and allow nothing else."""
    a = tokenizer.encode("a").ids[0]
    spec = spec_of(
        regex("a{30}"),
        temperature=temperature,
        logit_bias=((a, -100.0), (a + 1, 100.0)),
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=10.0,
        top_k=1,
        top_p=0.01,
        min_p=1.0,
    )
    (output,) = generate(engine, [spec])
    assert text_of(output, tokenizer) == "a" * 30
    assert output.finish_reason is FinishReason.STOP


def test_biases_choose_among_what_is_allowed(engine: Engine, tokenizer: Tokenizer) -> None:
    b = tokenizer.encode("b").ids[0]
    spec = spec_of(regex("(a|b){5}"), temperature=0.0, logit_bias=((b, 100.0),))
    (output,) = generate(engine, [spec])
    assert text_of(output, tokenizer) == "bbbbb"


def test_a_grammars_end_goes_before_min_tokens_and_ignore_eos(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    for changes in ({"min_tokens": 50}, {"ignore_eos": True}, {"ignore_eos": True, "seed": 5}):
        (output,) = generate(engine, [spec_of(regex("ab{0,20}c?"), **changes)])
        assert output.finish_reason is FinishReason.STOP
        # Everything that may follow was said before the end.
        assert text_of(output, tokenizer).endswith("c")


def test_min_tokens_are_kept_where_the_grammar_goes_on(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    (output,) = generate(engine, [spec_of(regex("a*"), min_tokens=40, temperature=1.0)])
    assert len(output.token_ids) > 40


def test_stop_tokens_end_a_text_in_its_middle(engine: Engine, tokenizer: Tokenizer) -> None:
    b = tokenizer.encode("b").ids[0]
    spec = spec_of(regex("aab(a|b)*"), stop_token_ids=(b,))
    (output,) = generate(engine, [spec])
    assert text_of(output, tokenizer) == "aab"
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("cut", [0, 1, 5, 17])
def test_a_moved_sequence_goes_on_where_it_was(engine: Engine, cut: int) -> None:
    """The next engine replays its output, and draws the tokens that would have come."""
    spec = spec_of(json_grammar(PERSON), temperature=1.0, seed=3)
    (whole,) = generate(engine, [spec])
    moved = replace(spec, token_ids=spec.token_ids + whole.token_ids[:cut])
    (rest,) = generate(engine, [moved])
    assert rest.token_ids == whole.token_ids


def test_preempted_sequences_say_what_they_would_have_said(engine: Engine) -> None:
    specs = [
        spec_of(regex("(abc|bca|cab){20}"), f"r{n}", temperature=1.0, seed=n) for n in range(4)
    ]
    expected = generate(engine, specs)
    # Each needs six blocks in the end.
    crowded = fresh(engine, blocks=14)
    assert generate(crowded, specs) == expected
    assert crowded.scheduler.preemptions > 0


def test_chunked_prompts_are_answered_alike(engine: Engine) -> None:
    spec = spec_of(json_grammar(PERSON), temperature=1.0, seed=4)
    expected = generate(engine, [spec])
    assert generate(fresh(engine, chunk_tokens=7), [spec]) == expected


def schemas() -> st.SearchStrategy[Any]:
    """Small ones, nested, every keyword with a bound: a random model need not end by itself."""
    leaf = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
            st.integers(-50, 50),
            st.integers(0, 500),
        ),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9)), min_size=1, max_size=3),
        ),
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        arrays = st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        )
        objects = st.builds(
            lambda properties, optional: {
                "type": "object",
                "properties": properties,
                "required": [name for n, name in enumerate(properties) if n % 2 or not optional],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", 'q"', "é"]), inner, max_size=3),
            st.booleans(),
        )
        return st.one_of(arrays, objects, st.builds(lambda x, y: {"anyOf": [x, y]}, inner, leaf))

    return st.recursive(leaf, larger, max_leaves=5)


numbers = itertools.count()


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=schemas(), temperature=st.sampled_from([0.0, 1.0]))
def test_whatever_the_schema_the_answer_matches_it(
    engine: Engine, tokenizer: Tokenizer, schema: Any, temperature: float
) -> None:
    # A random model says all that it may, also white space that no keyword of a schema bounds.
    white = [tokenizer.token_to_id(token) for token in "Ġ\u010aĉč"]
    spec = spec_of(
        json_grammar(schema),
        f"p{next(numbers)}",
        temperature=temperature,
        max_tokens=450,
        ignore_eos=temperature == 0.0,
        logit_bias=tuple((token, -100.0) for token in white if token is not None),
    )
    (output,) = generate(engine, [spec])
    assert output.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(output, tokenizer)), schema)


def test_a_sequence_whose_grammar_fails_ends_alone(engine: Engine) -> None:
    """The others of its steps go on; so does the step that was planned behind."""
    lone = fresh(engine)
    scheduler, runner = lone.scheduler, lone.runner
    sound = spec_of(regex("a{30}"), "sound", temperature=0.0)
    (expected,) = generate(engine, [sound])
    # What came before the cut does not match: as if another grammar had been followed.
    broken = spec_of(regex("b{30}"), "broken")
    broken = replace(broken, token_ids=(*broken.token_ids, 5))
    sequences = [make_sequence(lone, n, spec) for n, spec in enumerate([broken, sound])]
    for sequence in sequences:
        compile_grammar(lone, sequence)
        scheduler.add(sequence)
    failures = []
    plans = [scheduler.schedule()]
    while plans:
        plan = plans.pop(0)
        assert plan is not None
        # As in a worker: the next step is planned before this one has run.
        behind = scheduler.schedule()
        updates = scheduler.complete(plan, runner.run(plan))
        failures += [(u.sequence.spec.request_id, u.failure) for u in updates if u.failure]
        if plans or behind is not None:
            plans.append(behind)
        elif (after := scheduler.schedule()) is not None:
            plans.append(after)
    assert [name for name, _ in failures] == ["broken"]
    assert "grammar" in failures[0][1]
    assert tuple(sequences[1].token_ids[20:]) == expected.token_ids
    assert scheduler.is_idle()


def test_a_sequence_without_the_matcher_of_its_grammar_fails() -> None:
    rows = GrammarRows(VOCAB)
    sampling = SamplingParams(grammar=regex("a"))
    rows.learn(NewSequence(1, (1, 2), 2, sampling, (EOS,)))
    rows.learn(NewSequence(2, (1, 2), 2, SamplingParams(), (EOS,)))
    assert "was not compiled" in rows.failure(1)
    assert rows.failure(2) == ""
    assert rows.masks(1, [1, 2], 2, [3]) == [None, None]
    rows.forget(1)
    rows.forget(2)
    assert not rows.binds(1, 0)


def test_choices_and_drafts_have_the_masks_of_their_places(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    """Of a step with neighbours; choices share their tokens, drafts go on from the first's."""
    a, b, c = (tokenizer.encode(letter).ids[0] for letter in "abc")
    sampling = SamplingParams(grammar=regex("ab(c|d)"))
    rows = GrammarRows(VOCAB)
    matcher = engine.grammars.matcher(regex("ab(c|d)"))
    for number in (1, 2):
        rows.learn(NewSequence(number, (9, 9), 2, sampling, (EOS,), matcher=matcher))

    def draw(tokens: list[int], sampling: SamplingParams = sampling) -> SampleRow:
        return SampleRow(sampling, [9, 9, *tokens], 2, (EOS,))

    plain = draw([7], SamplingParams())
    draws = [draw([a]), draw([a, b]), draw([a, b, c]), plain, draw([]), draw([])]
    found = rows.masked([1, 1, 1, 5, 2, 2], draws)
    assert [row.token_ids for row in found] == [row.token_ids for row in draws]
    assert found[3] is plain
    allowed = [
        set(unpack(row.mask, VOCAB).nonzero()[0].tolist()) for row in found if row.mask is not None
    ]
    assert allowed == [{b}, {c, c + 1}, {EOS}, {a}, {a}]
    # The drafts were wrong: the sequence goes on behind its first token.
    (again,) = rows.masked([1], [draw([a, b])])
    assert again.mask is not None
    assert set(unpack(again.mask, VOCAB).nonzero()[0].tolist()) == {c, c + 1}
