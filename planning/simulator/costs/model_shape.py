"""Reads the sizes of a model that determine its costs, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config_fields import ConfigFields
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model, in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Inner size of an MLP, or of one expert."""
    vocabulary: int
    context_length: int
    """Maximum context, in tokens."""
    mlp_matrices: int = 3
    """Number of matrices of an MLP: 3 if it is gated, 2 otherwise."""
    experts: int = 0
    """Number of experts of a layer; each token uses ``experts_met`` of them. 0 means that all
    tokens use the same MLP."""
    experts_met: int = 0

    @property
    def attention_weights(self) -> int:
        """Return the number of attention weights in all layers: queries, keys, values and the
        output.
        """
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.hidden * (2 * wide + 2 * narrow)

    @property
    def mlp_weights(self) -> int:
        """Return the number of MLP weights in all layers, counting one expert per layer."""
        return self.layers * self.mlp_matrices * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Return the number of weights of the output head, which is equal to that of the
        embeddings.
        """
        return self.vocabulary * self.hidden

    def read_weights(self, tokens: int) -> float:
        """Return the number of weights that a step with ``tokens`` tokens reads.

        With experts, this is the expected number if each token chooses its experts uniformly.
        """
        if not self.experts:
            return self.attention_weights + self.mlp_weights
        missed = (1.0 - self.experts_met / self.experts) ** tokens
        gates = self.layers * self.hidden * self.experts
        return self.attention_weights + gates + self.mlp_weights * self.experts * (1.0 - missed)

    @property
    def used_weights(self) -> float:
        """Return the number of layer weights by which each token is multiplied."""
        if not self.experts:
            return self.attention_weights + self.mlp_weights
        gates = self.layers * self.hidden * self.experts
        return self.attention_weights + gates + self.mlp_weights * self.experts_met

    @property
    def all_weights(self) -> float:
        """Return the number of weights in memory, including embeddings and a separate output
        head."""
        return self.read_weights(1 << 20) + 2 * self.head_weights

    def kv_token_bytes(self, value_bytes: float) -> float:
        """Return the bytes of one token's KV in all layers, at ``value_bytes`` per value."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


MODELS: Mapping[str, ModelShape] = {
    model.name: model
    for model in (
        # From config.json on Hugging Face: meta-llama/Llama-3.1-8B, -70B, Llama-2-13b-hf,
        # Llama-2-70b-hf; facebook/opt-13b.
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
        ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, 2048, mlp_matrices=2),
    )
}
DEFAULT_MODEL = "llama-3.1-8b"


def model_shape(name: str) -> ModelShape:
    """Return the sizes of a model. ``name`` is a name that this module knows, or the path of a
    config.json. Raises ConfigError.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        known = ", ".join(MODELS)
        raise ConfigError(
            f"{name} is neither a config.json that can be read ({error}) nor one of {known}"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a JSON object")
    try:
        return _read(path.parent.name or name, fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} lacks a size, or has one that is not a number: {error}"
        ) from error


def _read(name: str, whole: Mapping[str, Any]) -> ModelShape:
    fields: Mapping[str, Any] = whole.get("text_config") or whole
    hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
    experts = int(fields.get("num_local_experts") or fields.get("num_experts") or 0)
    wide = fields.get("ffn_dim") or fields["intermediate_size"]
    return ModelShape(
        name=name,
        layers=int(fields["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        intermediate=int((fields.get("moe_intermediate_size") if experts else None) or wide),
        vocabulary=int(fields["vocab_size"]),
        context_length=ConfigFields(Path(name), fields).context_length(2048),
        mlp_matrices=2 if "ffn_dim" in fields else 3,
        experts=experts,
        experts_met=int(fields.get("num_experts_per_tok") or 0),
    )
