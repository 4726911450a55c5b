"""Shared by the tests of families and by other tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from tests.support.engine.model_pair import (
    VOCAB,
    randomise,
)

WINDOW = 20


"""Far fewer than the tokens, and no multiple of the block size."""


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}


GEMMA = {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 40}


EXPERTS = {"num_experts_per_tok": 2, "num_experts": 5, "moe_intermediate_size": 40}


@dataclass(frozen=True)
class Case:
    """A tiny model of a family."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0


CASES = {
    "llama": Case("llama"),
    "llama, YaRN": Case("llama", {"rope_parameters": YARN}),
    "mistral": Case("mistral", {"sliding_window": WINDOW}),
    "mistral without window": Case("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral, window as wide as the context": Case("mistral", {"sliding_window": 256}),
    "qwen2": Case("qwen2"),
    "qwen2 with windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "qwen3 with windows": Case(
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3 with windows": Case(
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3": Case("phi3", {"sliding_window": WINDOW}),
    "phi3, partly rotated": Case(
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "phi3, longrope": Case(
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    ),
    "phi3, longrope within its context": Case(
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
    ),
    "gemma2": Case(
        "gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
        norm_offset=1.0,
    ),
    "gemma2 without caps": Case(
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        norm_offset=1.0,
    ),
    "gemma3": Case(
        "gemma3_text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
        norm_offset=1.0,
    ),
    "olmo2": Case("olmo2"),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "mixtral with window": Case("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3_moe": Case(
        "qwen3_moe", EXPERTS | {"head_dim": 24, "norm_topk_prob": True, "decoder_sparse_step": 2}
    ),
    "qwen3_moe, not normalized": Case(
        "qwen3_moe",
        EXPERTS
        | {
            "head_dim": 16,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
}


def make_reference(case: Case, **changes: Any) -> Any:
    config = AutoConfig.for_model(case.model_type, **(SIZES | case.changes | changes))
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager")
    randomise(model, case.norm_offset)
    return model.eval()
