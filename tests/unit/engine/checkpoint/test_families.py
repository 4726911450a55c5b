"""Every model family against ``transformers`` in fp32, from the folder that it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import load_model_config
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.quantization.weight import QuantizedWeight, dequantize, quantize
from engine.scheduling.plan import PlanRow
from tests.support.engine.families import CASES, SIZES, make_reference
from tests.support.engine.model_pair import (
    CPU,
    Pair,
    close,
    compute,
    new_cache,
    randomise,
    save_pair,
    some_tokens,
)

TOKENS = 75
BLOCK = 8


MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Olmo2ForCausalLM": "olmo2",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check_pair(pair: Pair) -> None:
    """Whole prompt, uneven chunks, and tokens one by one give the logits of ``transformers``."""
    tokens = some_tokens(TOKENS)
    expected = pair.expected(tokens)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    table = tuple(range(20, 10, -1))
    whole = compute(pair, new_cache(pair, BLOCK), [(tokens, PlanRow(0, 0, TOKENS, table, True))])
    close(whole, expected)
    cache, start, found = new_cache(pair, BLOCK), 0, []
    for count in (13, 2, 30, 8, *(1,) * (TOKENS - 53)):
        found.append(compute(pair, cache, [(tokens, PlanRow(0, start, count, table, True))]))
        start += count
    close(torch.cat(found), expected)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_pair(save_pair(make_reference(CASES[name]), tmp_path))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_as_good_as_single_ones(tmp_path: Path, name: str) -> None:
    """The folder has a tensor for each expert, the model in memory has fused ones."""
    reference = make_reference(CASES[name])
    reference.config.architectures = [type(reference).__name__]
    reference.config.save_pretrained(tmp_path)
    weights = reference.state_dict()
    assert any("experts.gate_up_proj" in name for name in weights)
    check_pair(Pair(reference, DecoderModel(load_model_config(tmp_path), weights, CPU)))


def test_the_text_side_of_gemma_3_that_sees_images(tmp_path: Path) -> None:
    text = SIZES | CASES["gemma3"].changes
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    # What sees images takes seconds to import: more than all else that is collected.
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration  # noqa: PLC0415

    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model: Any = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    randomise(model.eval(), offset=1.0)
    check_pair(save_pair(model, tmp_path))


def test_gemma_3_as_it_was_published_says_the_same(tmp_path: Path) -> None:
    """Its config.json has older names for the tables and for the order of layers."""
    make_reference(CASES["gemma3"]).save_pretrained(tmp_path)
    expected = load_model_config(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del fields[name]
    fields |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    path.write_text(json.dumps(fields))
    assert load_model_config(tmp_path) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_lacks_is_what_transformers_makes_of_it(tmp_path: Path, name: str) -> None:
    kind = MODEL_TYPES[name]
    sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size")}
    fields: dict[str, Any] = {**sizes, "num_hidden_layers": 8, "num_attention_heads": 32}
    if FAMILIES[name].experts is not None:
        fields["num_experts"] = 8
    if FAMILIES[name].text_config:
        fields = {"text_config": fields}
    fields |= {"architectures": [name], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = load_model_config(tmp_path)
    expected: Any = AutoConfig.from_pretrained(tmp_path).get_text_config()
    heads = expected.num_attention_heads
    assert found.kv_heads == expected.num_key_value_heads
    assert found.head_dim == (getattr(expected, "head_dim", None) or expected.hidden_size // heads)
    assert found.context_length == expected.max_position_embeddings
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.tied_embeddings == expected.tie_word_embeddings
    window = getattr(expected, "sliding_window", None) or 0
    kinds = getattr(expected, "layer_types", None) or ["sliding_attention"] * 8
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    assert found.windows == tuple(n if n < found.context_length else 0 for n in windows)
    assert found.attention_softcap == (getattr(expected, "attn_logit_softcapping", None) or 0.0)
    assert found.logits_softcap == (getattr(expected, "final_logit_softcapping", None) or 0.0)
    ropes = expected.rope_parameters
    for layer, rope in enumerate(found.layer_ropes):
        if rope >= 0:
            theta = ropes.get(kinds[layer], ropes)["rope_theta"]
            assert found.ropes[rope].theta == theta
        else:
            assert not expected.no_rope_layers[layer]
    if found.experts is not None:
        assert found.experts.per_token == expected.num_experts_per_tok
        assert found.experts.intermediate_size == getattr(
            expected, "moe_intermediate_size", expected.intermediate_size
        )
        assert found.experts.normalized == getattr(expected, "norm_topk_prob", True)
        assert found.experts.layers == frozenset(range(8))


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "qwen3", "mixtral"])
def test_half_precision_is_as_near_as_that_of_transformers(tmp_path: Path, name: str) -> None:
    pair = save_pair(make_reference(CASES[name]), tmp_path)
    config, tokens = pair.model.config, some_tokens(TOKENS)
    half = DecoderModel(config, load_weights(tmp_path, CPU, torch.bfloat16), CPU)
    cache = KvCache(config, 10, BLOCK, torch.bfloat16, CPU)
    row = PlanRow(0, 0, TOKENS, tuple(range(10)), True)
    found = compute(Pair(pair.reference, half), cache, [(tokens, row)])
    expected = pair.expected(tokens)
    other = Pair(pair.reference.to(torch.bfloat16), half).expected(tokens).float()
    assert (found - expected).abs().mean() < 1.2 * (other - expected).abs().mean()


def test_embeddings_are_scaled_as_the_weights_type_rounds_it(tmp_path: Path) -> None:
    make_reference(CASES["gemma2"], hidden_size=72).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.embedding_scale == 72**0.5
    for dtype in (torch.float32, torch.bfloat16):
        model = DecoderModel(config, load_weights(tmp_path, CPU, dtype), CPU)
        assert model.embedding_scale == torch.tensor(72**0.5, dtype=dtype).item()
    assert model.embedding_scale == 8.5


@pytest.mark.parametrize("name", ["phi3", "smollm3", "qwen3_moe"])
def test_quantized_weights_compute_what_their_values_do(tmp_path: Path, name: str) -> None:
    """Fused ones are split, a tied embedding is looked up and multiplied by."""
    make_reference(CASES[name]).save_pretrained(tmp_path)
    plain = load_weights(tmp_path, CPU, torch.float32)
    quantized: dict[str, Any] = {
        name: quantize(weight, "int8") if weight.dim() == 2 and "mlp.gate." not in name else weight
        for name, weight in plain.items()
        if isinstance(weight, torch.Tensor)
    }
    values = {
        name: dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
        for name, weight in quantized.items()
    }
    config, tokens = load_model_config(tmp_path), some_tokens(TOKENS)
    row = PlanRow(0, 0, TOKENS, tuple(range(10)), True)
    results = []
    for weights in (quantized, values):
        pair = Pair(None, DecoderModel(config, weights, CPU))
        results.append(compute(pair, new_cache(pair, BLOCK), [(tokens, row)]))
    close(*results)
