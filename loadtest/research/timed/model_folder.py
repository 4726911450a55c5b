"""Writes a model's folder without weights. It has what a router and the timed engine read from such
a folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baton.errors import ConfigError
from loadtest.common.byte_tokenizer import write_tokenizer
from worker.costs.step_costs import StepCosts

VOCABULARY = 2048
CONTEXT_TOKENS = 131_072
KV_TOKEN_BYTES = 32
"""KV bytes per token of the model: one layer with one head of eight, in bfloat16."""
_COSTS, _KEY = "step-costs.safetensors", "step_costs"


def write_model_folder(
    folder: Path, costs: StepCosts, context_tokens: int = CONTEXT_TOKENS
) -> Path:
    """Write config and tokenizer of a Llama whose KV takes ``KV_TOKEN_BYTES`` per token; returns
    the folder.

    A byte of text is a token: a prompt of n letters has n tokens. The folder contains ``costs``
    instead of weights. A real engine that loads the folder reports that the weights are missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({}, folder / _COSTS, {_KEY: json.dumps([costs.prefill, costs.step])})
    write_tokenizer(folder, VOCABULARY)
    return folder


def read_step_costs(folder: Path) -> StepCosts:
    """Read the step costs from a folder of ``write_model_folder``. Raises ConfigError for any other
    folder.
    """
    try:
        with safe_open(folder / _COSTS, "numpy") as file:
            prefill, step = json.loads(file.metadata()[_KEY])
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} was not made for the timed engine: {error}") from error
    return StepCosts(tuple(prefill), tuple(step))
