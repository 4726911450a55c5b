"""An EAGLE-3 head (Li et al., 2025): one layer that predicts the token after the next.

A row of the head is a token and a feature. The feature is made from the outputs of three of the
target's layers for the *previous* token. After drafted tokens, the head's own output replaces it.
The layer's attention takes the normed embedding of the token and the normed feature. Its residual
stream begins with the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from baton.errors import ConfigError
from engine.kv.kv_cache import KvGroup
from engine.model.layers import GatedMlp
from engine.model.model import DecoderModel, Layer, StepTokens
from engine.model.named_tensors import Matrix, NamedTensors
from engine.model.rope import rope_table
from engine.model.torch_step import TorchStepModel
from engine.sampling.step import StepInput, StepOutput
from engine.speculation.heads.eagle_config import FEATURE_LAYERS, EagleConfig

_LAYERS = ("midlayer", "layers.0", "model.layers.0")
"""Prefixes of the tensor names of the head's layer: as published, and after common conversions."""
_EMBEDDING = "embed_tokens.weight"


class EagleModel(DecoderModel):
    """An EAGLE-3 head in plain torch, as the reference. It holds no state except its weights."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Matrix],
        target: DecoderModel,
        device: torch.device,
    ) -> None:
        """``weights`` maps the published tensor names to weights.

        The names are ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t``, and ``embed_tokens``
        if the head does not share the target's. Raises ConfigError if one is missing or its shape
        differs from ``config``.
        """
        tensors = NamedTensors(weights)
        model = config.model
        hidden = model.hidden_size
        self.config = model
        self.feature_layers = config.feature_layers
        self.target_hidden_size = config.target_hidden_size
        self.dtype = target.dtype
        self.combine = tensors.linear("fc", hidden, FEATURE_LAYERS * config.target_hidden_size)
        self.layers = [_layer(config, tensors)]
        self.norm = tensors.take("norm.weight", hidden).float()
        self.head = tensors.linear("lm_head", config.draft_vocab_size, hidden)
        self.ropes = tuple(rope_table(spec, model.context_length, device) for spec in model.ropes)
        self.embedding, self.embedding_scale = _embedding(config, tensors, target)
        self.token_ids = _token_ids(config, weights)
        """int64 [draft_vocab_size]: the target's ids of the tokens that the head can draft."""

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Make the head's features, fp32 [tokens, hidden_size], from inputs of the target's layers.

        ``hidden`` has the inputs of the target's ``feature_layers``: fp32 [tokens, feature_layers,
        target_hidden_size].
        """
        assert self.combine is not None
        return self.combine.to_float(hidden.flatten(1).to(self.dtype))

    def outputs(
        self,
        batch: StepTokens,
        features: torch.Tensor,
        cache: KvGroup,
        layer_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the head's layer for tokens and their features, and store keys and values.
        Returns fp32 [tokens, hidden_size].

        The result is the feature for the next drafted token, and the input of ``logits``.
        """
        (layer,) = self.layers
        assert layer.feature_norm is not None
        normed = self._norm(features, layer.feature_norm)
        x = normed if layer.residual_normed else features
        embedded = self._before(self._embed(batch.token_ids), layer.attention_norm)
        both = torch.cat((embedded, normed.to(self.dtype)), dim=-1)
        attended = self._attention(both, layer, 0, batch, cache, self.ropes[0][batch.positions])
        if layer_done is not None:
            layer_done(0)
        x = x + attended
        return x + self._mlp(self._before(x, layer.mlp_norm), layer.mlp)


def _layer(config: EagleConfig, tensors: NamedTensors) -> Layer:
    model = config.model
    hidden, inner = model.hidden_size, model.intermediate_size
    base = next((name for name in _LAYERS if f"{name}.hidden_norm.weight" in tensors), _LAYERS[0])
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def norm(name: str) -> torch.Tensor:
        return tensors.take(f"{base}.{name}.weight", hidden).float()

    return Layer(
        attention_norm=norm("input_layernorm"),
        query=tensors.linear(f"{base}.self_attn.q_proj", wide, 2 * hidden),
        key=tensors.linear(f"{base}.self_attn.k_proj", narrow, 2 * hidden),
        value=tensors.linear(f"{base}.self_attn.v_proj", narrow, 2 * hidden),
        output=tensors.linear(f"{base}.self_attn.o_proj", hidden, wide),
        query_norm=None,
        key_norm=None,
        attention_post_norm=None,
        mlp_norm=norm("post_attention_layernorm"),
        mlp_post_norm=None,
        mlp=GatedMlp(
            tensors.linear(f"{base}.mlp.gate_proj", inner, hidden),
            tensors.linear(f"{base}.mlp.up_proj", inner, hidden),
            tensors.linear(f"{base}.mlp.down_proj", hidden, inner),
        ),
        feature_norm=norm("hidden_norm"),
        residual_normed=config.norm_before_residual,
    )


def _embedding(
    config: EagleConfig, tensors: NamedTensors, target: DecoderModel
) -> tuple[Matrix, float]:
    """Return the token embedding that the head uses, its own or the target's, and the factor of the
    embeddings."""
    model = config.model
    for name in (_EMBEDDING, f"model.{_EMBEDDING}"):
        if name in tensors:
            return tensors.matrix(name, model.vocab_size, model.hidden_size), 1.0
    if model.hidden_size != config.target_hidden_size:
        raise ConfigError(
            f"the EAGLE-3 head has no {_EMBEDDING}, and its hidden_size {model.hidden_size} is not"
            f" the target's {config.target_hidden_size}"
        )
    return target.embedding, target.embedding_scale


def _token_ids(config: EagleConfig, weights: Mapping[str, Matrix]) -> torch.Tensor:
    """Make the table of the target's token id for each of the head's outputs.

    The tensor ``d2t`` has, for each output, the difference between the target's id and the output's
    number.
    """
    count, vocab = config.draft_vocab_size, config.model.vocab_size
    places = torch.arange(count)
    found = weights.get("d2t")
    if found is None:
        if count != vocab:
            raise ConfigError(f"the EAGLE-3 head drafts {count} tokens of {vocab} and has no d2t")
        return places
    if not isinstance(found, torch.Tensor) or found.shape != (count,) or found.is_floating_point():
        raise ConfigError(f"the EAGLE-3 head's d2t must have {count} integers")
    token_ids = places + found.cpu().long()
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab:
        raise ConfigError("the EAGLE-3 head's d2t contains tokens that the target does not have")
    return token_ids


class EagleTorchStep(TorchStepModel):
    """Computes an EAGLE head's steps in plain torch. Reference implementation of
    ``engine.sampling.step.StepModel``.

    Each step needs ``StepInput.features`` or ``states``; its ``hidden`` is the output of its one
    layer.
    """

    def __init__(self, model: EagleModel, cache: KvGroup, device: torch.device) -> None:
        super().__init__(model, cache, device)
        self._eagle = model

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        assert step.hidden_layers in ((), (1,))
        features = step.features
        if features is None:
            assert step.states is not None
            features = self._eagle.features(step.states)
        found = self._eagle.outputs(self._batch(step), features, self._cache, self._layer_done)
        hidden = found[:, None] if step.hidden_layers else None
        logits = self._eagle.logits(found[step.outputs])
        if step.greedy:
            return StepOutput(logits.argmax(dim=-1).tolist(), None, hidden)
        return StepOutput(None, logits, hidden)
