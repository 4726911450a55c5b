"""The decoder against ``transformers`` in fp32, however a sequence's tokens come to be computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import load_weights
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from tests.support.engine.model_pair import (
    CPU,
    VOCAB,
    Pair,
    close,
    compute,
    load,
    new_cache,
    randomise,
    save_pair,
    some_tokens,
)
from tests.support.models import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "as many KV heads": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "heads wider than hidden": {"head_dim": 16},
    "llama3 RoPE": {"rope_parameters": LLAMA3},
    "linear RoPE": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    },
    "other epsilon": {"rms_norm_eps": 0.1},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_reference(**changes: Any) -> Any:
    """A tiny Llama whose every weight, norms and biases too, is random."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**(fields | changes)))
    randomise(model)
    return model


def make_pair(folder: Path, shard: str = "1GB", **changes: Any) -> Pair:
    return save_pair(make_reference(**changes), folder, shard)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    pair = make_pair(tmp_path, **VARIANTS[name])
    tokens = some_tokens(150)
    expected = pair.expected(tokens)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    cache = new_cache(pair, 16)
    table = tuple(range(5, 15))
    whole = compute(pair, cache, [(tokens, PlanRow(0, 0, 149, table, True))])
    last = compute(pair, cache, [(tokens, PlanRow(0, 149, 1, table, True))])
    close(torch.cat((whole, last)), expected)


@torch.inference_mode()
def test_what_goes_into_layers_is_what_transformers_says(plain: Pair) -> None:
    tokens = some_tokens(30)
    cache = new_cache(plain, 16)
    model = TorchStepModel(plain.model, cache, cache.data.device)
    layers = len(plain.model.layers)
    wanted = (layers, 1, 0)
    table = (3, 1)
    found = []
    for start, count in ((0, 17), (17, 13)):
        row = PlanRow(0, start, count, table, True)
        ids = tokens[start : start + count]
        hidden = model.run(StepInput((row,), ids, [count - 1], True, wanted)).hidden
        assert hidden is not None
        found.append(hidden)
    states = torch.cat(found)
    assert states.shape == (30, 3, plain.model.config.hidden_size)
    said = plain.reference(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    close(states[:, 1], said.hidden_states[1][0])
    close(states[:, 2], said.hidden_states[0][0])
    close(plain.model.logits(states[:, 0]), said.logits[0])
    row = PlanRow(0, 0, 17, table, True)
    assert model.run(StepInput((row,), tokens[:17], [16], False)).hidden is None


def test_shards_are_one_model(tmp_path: Path, plain: Pair) -> None:
    pair = make_pair(tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = some_tokens(20)
    row = PlanRow(0, 0, 20, (1, 0), True)
    found = compute(pair, new_cache(pair, 16), [(tokens, row)])
    assert torch.equal(found, compute(plain, new_cache(plain, 16), [(tokens, row)]))
    close(found, pair.expected(tokens))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_any_chunks_are_the_whole(plain: Pair, block_size: int, chunks: list[int]) -> None:
    total = sum(chunks)
    tokens = some_tokens(total, seed=total)
    cache = new_cache(plain, block_size, blocks=220)
    table = tuple(range(219, 219 - -(-total // block_size), -1))
    found, start = [], 0
    for count in chunks:
        row = PlanRow(0, start, count, table, False)
        found.append(compute(plain, cache, [(tokens, row)]))
        start += count
    close(torch.cat(found), plain.expected(tokens))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prefix_of_another_sequence_is_as_good_as_ones_own(plain: Pair, block_size: int) -> None:
    """Blocks that the first sequence has filled stand in the tables of the next two."""
    cache = new_cache(plain, block_size, blocks=200)
    shared = some_tokens(32)
    kept = 32 // block_size
    first = tuple(range(60, 60 + kept))
    compute(plain, cache, [(shared, PlanRow(0, 0, 32, first, True))])
    before = cache.data[60 : 60 + kept].clone()
    longer = shared + some_tokens(9, seed=1)
    own = tuple(range(100, 100 + 9))
    found = compute(plain, cache, [(longer, PlanRow(1, 32, 9, first + own, True))])
    close(found, plain.expected(longer)[32:])
    # All of it is cached: the last token is computed again, into a block of the sequence's own.
    kept_tokens = 32 - block_size
    last = PlanRow(2, kept_tokens, block_size, (*first[:-1], 150), True)
    close(compute(plain, cache, [(shared, last)]), plain.expected(shared)[kept_tokens:])
    assert torch.equal(cache.data[60 : 60 + kept], before), "a shared block was written"


def test_a_mixed_batch_computes_what_each_computes_alone(plain: Pair) -> None:
    sequences = [some_tokens(count, seed=count) for count in (30, 1, 17, 64, 33, 48)]
    computed = [29, 0, 0, 20, 16, 47]
    tables = [tuple(range(n, 60, 6)) for n in range(6)]
    cache = new_cache(plain, 8)
    for number, tokens in enumerate(sequences):
        if computed[number]:
            row = PlanRow(number, 0, computed[number], tables[number], False)
            compute(plain, cache, [(tokens, row)])
    rows = [
        (tokens, PlanRow(n, computed[n], len(tokens) - computed[n], tables[n], True))
        for n, tokens in enumerate(sequences)
    ]
    expected = [plain.expected(tokens)[computed[n] :] for n, tokens in enumerate(sequences)]
    before = cache.data.clone()
    close(compute(plain, cache, rows), torch.cat(expected))
    cache.data.copy_(before)
    close(compute(plain, cache, rows[::-1]), torch.cat(expected[::-1]))


def test_half_precision_is_near(tmp_path: Path, plain: Pair) -> None:
    plain.reference.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    tokens = some_tokens(40)
    model = DecoderModel(config, load_weights(tmp_path, CPU, torch.bfloat16), CPU)
    pair = Pair(plain.reference, model)
    cache = KvCache(config, 4, 16, torch.bfloat16, CPU)
    found = compute(pair, cache, [(tokens, PlanRow(0, 0, 40, (0, 1, 2), True))])
    expected = pair.expected(tokens)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_the_tiny_model_of_other_tests_is_a_llama(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    pair = Pair(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), load(folder))
    tokens = some_tokens(50)
    cache = new_cache(pair, 16)
    found = compute(pair, cache, [(tokens, PlanRow(0, 0, 50, (3, 2, 1, 0), True))])
    close(found, pair.expected(tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    weights = load_weights(folder, CPU, torch.float32)
    del weights[name]
    with pytest.raises(ConfigError, match=name):
        DecoderModel(load_model_config(folder), weights, CPU)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.embed_tokens.weight", lambda w: w[:-1]),
        ("lm_head.weight", lambda w: w[:, :-8]),
        ("model.layers.0.self_attn.q_proj.weight", lambda w: w[:-8]),
        ("model.layers.1.self_attn.v_proj.weight", lambda w: torch.cat((w, w))),
        ("model.layers.1.mlp.gate_proj.weight", lambda w: w.T),
        ("model.norm.weight", lambda w: w[:1]),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_named(
    folder: Path, name: str, change: Callable[[Any], torch.Tensor]
) -> None:
    weights = load_weights(folder, CPU, torch.float32)
    weights[name] = change(weights[name])
    with pytest.raises(ConfigError, match=name):
        DecoderModel(load_model_config(folder), weights, CPU)
