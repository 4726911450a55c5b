"""What a model's ``config.json`` says, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

KNOWN_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies (``llama3``), or a plain one (``linear``)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-type decoder. Sizes are in elements, the context in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    eos_ids: tuple[int, ...]


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for its end-of-sequence ids).

    Raises ConfigError for a folder without one, and for what this engine does not compute.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is no Hugging Face model folder")
    raw: dict[str, Any] = json.loads(path.read_text())
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise ConfigError(f"{path}: architecture {architecture} is not served; known: {known}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act {raw['hidden_act']} is not served; known: silu")
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, path),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(folder, raw),
    )


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise ConfigError(f"{path}: rope scaling {kind} is not served; known: default, linear, llama3")


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    found = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = raw.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
