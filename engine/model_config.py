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


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object of ``path``; null is as good as absent. Its methods raise ConfigError."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Fields:
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no JSON object")
        return cls(path, values)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = self.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {name} must be a whole number, and is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self.path}: {name} must be a number above 0, and is {value!r}")
        return float(value)

    def object(self, name: str) -> _Fields:
        """A JSON object within this one; empty where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {name} must be an object, and is {value!r}")
        return _Fields(self.path, value)


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for its end-of-sequence ids).

    Raises ConfigError for a folder without one, and for what this engine does not compute.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is no Hugging Face model folder")
    fields = _Fields.read(path)
    _refuse_unknown(fields)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{path}: head_dim {head_dim} is odd: it cannot be rotated in pairs")
    # In the order in which transformers looks.
    rope = fields.object("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=fields.size("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(folder, fields),
    )


def _refuse_unknown(fields: _Fields) -> None:
    """Raises ConfigError for a model that this engine would compute wrongly."""
    path, named = fields.path, fields.get("architectures", [])
    architecture = named[0] if isinstance(named, list) and named else "?"
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise ConfigError(f"{path}: architecture {architecture} is not served; known: {known}")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{path}: hidden_act {activation} is not served; known: silu")
    quantized = fields.object("quantization_config")
    if quantized.values:
        method = quantized.get("quant_method", "an unnamed method")
        raise ConfigError(f"{path}: weights quantised with {method} are not served")


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind,
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.size("original_max_position_embeddings"),
        )
    raise ConfigError(
        f"{rope.path}: rope scaling {kind} is not served; known: default, linear, llama3"
    )


def _eos_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    found = _Fields.read(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = fields.get("eos_token_id", [])
    return tuple(found) if isinstance(found, list) else (int(found),)
