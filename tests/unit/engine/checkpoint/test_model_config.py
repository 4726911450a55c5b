"""What is read from a model folder's JSON files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from baton.config_fields import MAX_VOCAB
from baton.errors import ConfigError
from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig, load_model_config
from engine.checkpoint.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
)

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 2,
    "use_sliding_window": True,
}


def load(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """The plain config with ``changes``; None takes a field away."""
    fields = {name: value for name, value in (PLAIN | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


def test_the_context_may_be_bounded(tmp_path: Path) -> None:
    own = load(tmp_path, max_position_embeddings=64)
    assert own.context_length == 64
    assert load_model_config(tmp_path, 64) == own
    assert load_model_config(tmp_path, 63) == replace(own, context_length=63)
    with pytest.raises(ConfigError, match="max_model_len is 65, and the model's context is 64"):
        load_model_config(tmp_path, 65)


def test_what_is_absent_has_llamas_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        layers=3,
        heads=4,
        kv_heads=4,
        head_dim=16,
        context_length=2048,
        rms_norm_eps=1e-6,
        tied_embeddings=False,
        eos_ids=(),
        activation="silu",
        norm_offset=0.0,
        norm_placement="pre",
        qk_norm="none",
        embedding_scale=1.0,
        attention_scale=0.25,
        attention_softcap=0.0,
        logits_softcap=0.0,
        windows=(0, 0, 0),
        ropes=(RopeSpec(10000.0, 16, None),),
        layer_ropes=(0, 0, 0),
        experts=None,
    )


def test_what_is_there_is_read(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        eos_token_id=7,
    )
    assert (found.kv_heads, found.head_dim, found.context_length) == (2, 24, 512)
    assert found.rms_norm_eps == 1e-5
    assert found.ropes == (RopeSpec(500000.0, 24, None),)
    assert found.tied_embeddings
    assert found.eos_ids == (7,)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": 500000.0, **LLAMA3},
        eos_token_id=[5, 6],
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    found = load_model_config(tmp_path)
    assert found.ropes == (RopeSpec(500000.0, 16, Llama3Scaling(32.0, 1.0, 4.0, 8192)),)
    assert (found.kv_heads, found.head_dim, found.eos_ids) == (2, 16, (5, 6))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, LinearScaling(2.0)),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"type": "dynamic", "factor": 2.0}, DynamicScaling(2.0)),
        ({"rope_type": "default"}, None),
        (LLAMA3, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ],
)
def test_the_older_name_of_rope_scaling(
    tmp_path: Path, rope: dict[str, Any], expected: RopeScaling | None
) -> None:
    (spec,) = load(tmp_path, rope_scaling=rope, rope_theta=50.0).ropes
    assert spec == RopeSpec(50.0, 16, expected)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_scaling_extend_the_context(
    field: str, kind: str, tmp_path: Path
) -> None:
    rope = {field: {"rope_type": kind, "factor": 4.0}}
    sizes = {"max_position_embeddings": 4096, "sliding_window": 8192}
    fields: dict[str, Any] = {**MISTRAL, **sizes, **rope}
    found = load(tmp_path, **fields)
    assert found.context_length == 16384
    assert set(found.windows) == {8192}
    assert load_model_config(tmp_path, 16384).context_length == 16384
    with pytest.raises(ConfigError, match="16384 tokens"):
        load_model_config(tmp_path, 16385)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=["llama3", "yarn", "gemma3"],
)
def test_other_scalings_are_in_the_context_already(fields: dict[str, Any], tmp_path: Path) -> None:
    assert load(tmp_path, max_position_embeddings=4096, **fields).context_length == 4096


def test_where_two_fields_say_different_things_transformers_decides(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "rope_theta": 111.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 222.0},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    for names in (fields.keys(), ["rope_theta", "rope_parameters"], ["rope_theta", "rope_scaling"]):
        chosen = {name: fields[name] for name in names}
        found = load(tmp_path, **chosen)
        rope: Any = LlamaConfig.from_pretrained(tmp_path).rope_parameters
        expected = RopeSpec(rope["rope_theta"], 16, LinearScaling(rope["factor"]))
        assert found.ropes == (expected,), chosen


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 9, (3, 4)),
        ({"eos_token_id": 0}, 9, (0,)),
        ({"temperature": 0.6}, 9, (9,)),
        (None, [9, 8], (9, 8)),
        (None, None, ()),
        # No row of the head is for them, so they are never drawn.
        (None, [9, 10**6], (9,)),
    ],
)
def test_ends_of_sequence(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    own: int | list[int] | None,
    expected: tuple[int, ...],
) -> None:
    assert load(tmp_path, generation, eos_token_id=own).eos_ids == expected


@pytest.mark.parametrize("value", [["x"], ["x", 1], "x", [None], True, [-1], 1.5, 2**40])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_ends_of_sequence_that_are_none_are_named(tmp_path: Path, file: str, value: Any) -> None:
    generation = {"eos_token_id": value} if file == "generation_config" else {}
    own = {"eos_token_id": value} if file == "config" else {}
    with pytest.raises(ConfigError, match=rf"{file}\.json: eos_token_id"):
        load(tmp_path, generation, **own)


def test_a_vocabulary_beyond_all_published_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size"):
        load(tmp_path, vocab_size=MAX_VOCAB + 1)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "\x00"])
def test_a_damaged_config_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_damaged_generation_config_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(tmp_path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, architectures=["FalconForCausalLM"])
    assert "FalconForCausalLM" in caught.value.message
    assert all(name in caught.value.message for name in FAMILIES)


def test_equal_tables_are_one_and_windows_beyond_the_context_none(tmp_path: Path) -> None:
    gemma: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "head_dim": 8,
    }
    found = load(tmp_path, **gemma)
    assert found.windows == (4096,) * 5 + (0, 4096)
    assert found.layer_ropes == (0,) * 5 + (1, 0)
    assert [spec.theta for spec in found.ropes] == [1e4, 1e6]
    found = load(tmp_path, **gemma, rope_local_base_freq=1e6, max_position_embeddings=4096)
    assert found.windows == (0,) * 7
    assert found.layer_ropes == (0,) * 7


def test_older_names_of_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 4096,
    }
    expected = load(tmp_path, **phi, rope_scaling={"type": "longrope", **factors})
    for kind in ("su", "yarn"):
        assert load(tmp_path, **phi, rope_scaling={"type": kind, **factors}) == expected
    # Two octaves more than 2**10.
    scaling = LongRopeScaling((1.0,) * 8, (2.0,) * 8, 1024, (1 + 2 / 10) ** 0.5)
    assert expected.ropes == (RopeSpec(10000.0, 16, scaling),)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    moe: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "num_experts": 8,
    }
    found = load(tmp_path, **moe, decoder_sparse_step=2, mlp_only_layers=[3]).experts
    assert found == ExpertsConfig(8, 8, 768, normalized=False, layers=frozenset({1, 5}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "xpos", "factor": 2.0}}, "xpos"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.2}, "head_dim"),
        ({"partial_rotary_factor": 1.5}, "head_dim"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window"),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN | {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        (QWEN | {"use_sliding_window": "yes"}, "use_sliding_window"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "no_rope_layers"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "hidden_size"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}, "num_experts"),
        (MIXTRAL | {"num_local_experts": 1}, "num_experts_per_tok"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load(tmp_path, **changes)
    assert named in caught.value.message
