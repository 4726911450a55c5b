"""Reads and checks a model's ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.checkpoint.families import (
    ACTIVATIONS,
    Activation,
    ExpertNames,
    Family,
    NormPlacement,
    QkNorm,
    family_of,
)
from engine.checkpoint.rope_spec import RopeSpec, read_rope_specs


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Configuration of a mixture of experts: each token is computed by ``per_token`` of ``count``
    MLPs."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    layers: frozenset[int]
    """Numbers of the layers that have experts. Every other layer has one MLP."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and options of a decoder model. Sizes are in elements, the context and windows in
    tokens."""

    architecture: str
    """Name of the model's architecture, a key of ``engine.checkpoint.families.FAMILIES``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    activation: Activation
    """Activation function of the gated MLP."""
    norm_offset: float
    """Number that is added to every norm's weight when it is loaded."""
    norm_placement: NormPlacement
    """Where a layer's attention and MLP have norms. ``pre``: at their input; ``sandwich``: at their
    input and output; ``post``: at their output, before it is added to the residual stream."""
    qk_norm: QkNorm
    """Whether queries and keys are normalized before their rotation: each head separately
    (``head``), or all heads of a token together (``full``)."""
    embedding_scale: float
    """Factor by which embeddings are multiplied. The model rounds this factor to the weights'
    type."""
    attention_scale: float
    """Factor by which the products of queries and keys are multiplied."""
    attention_softcap: float
    """Limit c of attention scores: a score s becomes c * tanh(s / c). 0 means that scores are
    unchanged."""
    logits_softcap: float
    """Limit c of logits: a logit s becomes c * tanh(s / c). 0 means that logits are unchanged."""
    windows: tuple[int, ...]
    """For each layer, the number of tokens that a query attends to, including its own; 0 means
    all."""
    ropes: tuple[RopeSpec, ...]
    """Specifications of the model's rotary tables, each of them once."""
    layer_ropes: tuple[int, ...]
    """For each layer, the index of its rotary table in ``ropes``; -1 if the layer has none."""
    experts: ExpertsConfig | None


def load_model_config(folder: Path, max_model_len: int = 0) -> ModelConfig:
    """Read a model's ``config.json``, and ``generation_config.json`` for its end-of-sequence ids.

    ``max_model_len`` bounds the context, in tokens; 0 means the model's own context.

    Raises ConfigError for a folder without ``config.json``, for features that this engine lacks,
    and if ``max_model_len`` exceeds the model's own context. ``engine.model.weights`` checks
    whether quantized weights can be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    whole = ConfigFields.read(path)
    architecture, family = family_of(whole)
    fields = (whole.object("text_config") if family.text_config else whole).over(family.defaults)
    _refuse_bidirectional(fields)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    layers, head_dim = fields.size("num_hidden_layers"), fields.size("head_dim", hidden // heads)
    vocab_size = fields.vocab_size() or fields.size("vocab_size")
    context = fields.context_length(2048)
    sliding = family.sliding_layers(fields)
    ropes, layer_ropes = _ropes(fields, family, sliding, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_bounded(path, context, max_model_len),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        # The model never draws a token for which it has no row.
        eos_ids=tuple(n for n in _eos_ids(folder, whole, fields) if 0 <= n < vocab_size),
        activation=_activation(fields),
        norm_offset=family.norm_offset,
        norm_placement=family.norm_placement,
        qk_norm=family.qk_norm,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        windows=_windows(fields, sliding, context),
        ropes=ropes,
        layer_ropes=layer_ropes,
        experts=None if family.experts is None else _experts(fields, family.experts),
    )


def _bounded(path: Path, context: int, max_model_len: int) -> int:
    """Return the context to serve, in tokens: ``max_model_len``, or the model's own ``context`` if
    that is 0. Raises ConfigError if ``max_model_len`` exceeds ``context``."""
    if max_model_len > context:
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the model's context is {context} tokens"
            f" (max_position_embeddings and rope_scaling, {path}): set at most {context}, or 0 for"
            " the model's own"
        )
    return max_model_len or context


def _refuse_bidirectional(fields: ConfigFields) -> None:
    """Raise ConfigError if the model is an encoder, such as EmbeddingGemma."""
    if fields.get("use_bidirectional_attention", False):
        raise ConfigError(
            f"{fields.path}: use_bidirectional_attention is not supported: answers are"
            " generated from left to right"
        )


def _activation(fields: ConfigFields) -> Activation:
    name = fields.get("hidden_activation") or fields.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{fields.path}: hidden_act {name} is not supported; known: {known}")
    return ACTIVATIONS[name]


def _windows(fields: ConfigFields, sliding: Iterable[int], context: int) -> tuple[int, ...]:
    window = 0
    if fields.get("sliding_window") is not None:
        window = fields.size("sliding_window")
    if window >= context:
        # The window covers the whole context.
        window = 0
    return tuple(
        window if layer in sliding else 0 for layer in range(fields.size("num_hidden_layers"))
    )


def _ropes(
    fields: ConfigFields, family: Family, sliding: frozenset[int], head_dim: int
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    original = fields.size("max_position_embeddings", 2048)
    full, local = read_rope_specs(fields, head_dim, original)
    unrotated = family.unrotated_layers(fields)
    chosen = [
        None if layer in unrotated else local if layer in sliding else full
        for layer in range(fields.size("num_hidden_layers"))
    ]
    distinct = tuple(dict.fromkeys(spec for spec in chosen if spec is not None))
    return distinct, tuple(-1 if spec is None else distinct.index(spec) for spec in chosen)


def _experts(fields: ConfigFields, names: ExpertNames) -> ExpertsConfig:
    # Mixtral's name; transformers 5 may use it for Qwen's num_experts, too.
    local = fields.get("num_local_experts") is not None
    count = fields.size("num_local_experts" if local else "num_experts")
    per_token = fields.size("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(f"{fields.path}: num_experts_per_tok {per_token} of {count} experts")
    dense, step = fields.list("mlp_only_layers"), fields.size("decoder_sparse_step", 1)
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=fields.size(names.intermediate_size),
        normalized=names.always_normalized or fields.flag("norm_topk_prob"),
        layers=frozenset(
            layer
            for layer in range(fields.size("num_hidden_layers"))
            if layer not in dense and (layer + 1) % step == 0
        ),
    )


def _eos_ids(folder: Path, whole: ConfigFields, fields: ConfigFields) -> tuple[int, ...]:
    generation = ConfigFields.read_if_any(folder / "generation_config.json")
    return generation.eos_ids() or whole.eos_ids() or fields.eos_ids()
