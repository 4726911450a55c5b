"""Log probabilities: the definition, and the C++ that equals it."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from baton.logprobs import TokenLogprobs
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.cpu.sampler import cpu_logprobs
from engine.engine import Engine, EngineSettings
from engine.offline import generate
from engine.sampling.logprobs import Scored, Scorer, token_logprobs
from tests.support.models import make_tiny_model

native = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
VOCABS = (1, 15, 16, 17, 300, 4099)


def scorer(kind: str) -> Scorer:
    if kind == "torch":
        return token_logprobs
    found = cpu_logprobs()
    assert found is not None
    return found


KINDS = [pytest.param("torch"), pytest.param("native", marks=native)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_it_is_the_log_softmax(kind: str, vocab: int) -> None:
    chance = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator) * chance.choice((0.1, 3.0, 30.0))
    before = logits.clone()
    wanted = [
        Scored(chance.randrange(5), chance.randrange(vocab), chance.choice((0, 1, 5, 20)))
        for _ in range(9)
    ]
    expected = logits.double().log_softmax(dim=-1)
    for each, found in zip(wanted, scorer(kind)(logits, wanted), strict=True):
        row = expected[each.row]
        assert found.logprob == pytest.approx(float(row[each.token_id]), abs=2e-5)
        count = min(each.top, vocab)
        best = row.topk(count)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=2e-5)
        assert dict(found.top).get(each.token_id, found.logprob) == found.logprob
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_ones_the_lower_id_comes_first(kind: str) -> None:
    logits = torch.zeros(1, 64)
    logits[0, 40] = logits[0, 7] = 3.0
    (found,) = scorer(kind)(logits, [Scored(0, 40, 2)])
    assert [token for token, _ in found.top] == [7, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_forbidden_and_certain_tokens(kind: str) -> None:
    logits = torch.full((1, 33), -math.inf)
    logits[0, 5] = 1e4
    found = scorer(kind)(logits, [Scored(0, 5, 1), Scored(0, 6, 0)])
    assert found[0] == TokenLogprobs(0.0, ((5, 0.0),))
    assert found[1].logprob == -math.inf


@native
def test_what_is_not_there_is_refused() -> None:
    for bad in (Scored(1, 0, 0), Scored(0, 8, 0), Scored(-1, 0, 0), Scored(0, -1, 0)):
        with pytest.raises(ValueError, match="unknown token"):
            scorer("native")(torch.zeros(1, 8), [bad])
    assert scorer("native")(torch.zeros(1, 8), []) == []


def engine_of(model: Path, chunk_tokens: int = 512) -> Engine:
    return build_engine(
        EngineSettings(model, "float32", "cpu", 1, kv_pool_bytes=4 << 20, chunk_tokens=chunk_tokens)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("scored") / "model")


PROMPT = tuple((37 * n + 11) % 300 for n in range(45))


def test_a_prompts_scores_do_not_depend_on_its_chunks(model: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    spec = SequenceSpec("r", 0, "", PROMPT, len(PROMPT), sampling)
    outputs = [generate(engine_of(model, chunk), [spec])[0] for chunk in (7, 512)]
    assert [len(output.prompt_logprobs) for output in outputs] == [len(PROMPT) - 1] * 2
    for one, other in zip(*(output.prompt_logprobs for output in outputs), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].logprobs == ()


def test_the_next_tokens_score_is_that_of_the_prompt_with_it(model: Path) -> None:
    """What is scored as answer and what is scored as prompt are the same."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    (answered,) = generate(engine_of(model), [SequenceSpec("r", 0, "", PROMPT, 45, greedy)])
    whole = (*PROMPT, *answered.token_ids)
    echoed = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (scored,) = generate(engine_of(model), [SequenceSpec("r", 0, "", whole, 51, echoed)])
    for answer, prompt in zip(answered.logprobs, scored.prompt_logprobs[-6:], strict=True):
        assert answer.logprob == pytest.approx(prompt.logprob, abs=1e-4)
        assert answer.top[0][0] == prompt.top[0][0]
    for token, logprobs in zip(answered.token_ids, answered.logprobs, strict=True):
        assert logprobs.top == ((token, logprobs.logprob),), "greedy takes the likeliest"


def test_scores_are_of_the_raw_logits_and_change_no_token(model: Path) -> None:
    wild = SamplingParams(
        temperature=0.3,
        top_k=5,
        seed=3,
        max_tokens=9,
        ignore_eos=True,
        frequency_penalty=1.0,
        logit_bias=((5, 20.0),),
    )
    plain = SequenceSpec("r", 0, "", PROMPT, 45, wild)
    asking = SamplingParams(
        **{name: getattr(wild, name) for name in wild.__slots__} | {"logprobs": 4}
    )
    without, scored = generate(
        engine_of(model), [plain, SequenceSpec("s", 0, "", PROMPT, 45, asking)]
    )
    assert without.token_ids == scored.token_ids
    assert without.logprobs == ()
    raw = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=4)
    (first,) = generate(engine_of(model), [SequenceSpec("r", 0, "", PROMPT, 45, raw)])
    for (token, one), (other_token, other) in zip(
        first.logprobs[0].top, scored.logprobs[0].top, strict=True
    ):
        assert token == other_token
        assert one == pytest.approx(other, abs=1e-4)
