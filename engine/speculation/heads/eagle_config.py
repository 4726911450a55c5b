"""Reads an EAGLE-3 checkpoint's ``config.json``, and checks it against the target's.

The format is that of the checkpoints on model hubs (``LlamaForCausalLMEagle3``): Li et al.,
EAGLE-3, 2025. A head has one layer of Llama's kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_spec import read_rope_specs

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
FEATURE_LAYERS = 3


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The shape of an EAGLE-3 head, and the layers of the target from which it takes its input."""

    model: ModelConfig
    """Configuration of the head's one layer; ``vocab_size`` is the target's."""
    draft_vocab_size: int
    """Number of tokens in the vocabulary from which the head drafts."""
    feature_layers: tuple[int, ...]
    """The target's layers whose inputs the head takes, as numbers in
    ``StepInput.hidden_layers``."""
    target_hidden_size: int
    norm_before_residual: bool
    """Whether the head's residual stream begins with the normed feature."""


def load_eagle_config(folder: Path, target: ModelConfig) -> EagleConfig:
    """Read the ``config.json`` of an EAGLE-3 head that was trained for ``target``.

    Raises ConfigError if ``folder`` has no EAGLE-3 head, or a head of another target.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it is not an EAGLE-3 checkpoint")
    fields = ConfigFields.read(path)
    named = [str(name) for name in fields.list("architectures")]
    if not set(named) & set(ARCHITECTURES):
        raise ConfigError(
            f"{path}: architectures {named} are not an EAGLE-3 head;"
            f" known: {', '.join(ARCHITECTURES)}"
        )
    if (layers := fields.size("num_hidden_layers", 1)) != 1:
        raise ConfigError(f"{path}: num_hidden_layers is {layers}, and a head has one layer")
    _same(fields, "vocab_size", target.vocab_size)
    model = _model(fields, target)
    target_hidden = fields.size("target_hidden_size", model.hidden_size)
    if target_hidden != target.hidden_size:
        raise ConfigError(
            f"{path}: the head takes hidden states of {target_hidden}, and the target has"
            f" {target.hidden_size}"
        )
    draft_vocab = fields.size("draft_vocab_size", target.vocab_size)
    if draft_vocab > target.vocab_size:
        raise ConfigError(
            f"{path}: draft_vocab_size {draft_vocab} is more than the target's {target.vocab_size}"
        )
    return EagleConfig(
        model,
        draft_vocab,
        _feature_layers(fields, target),
        target_hidden,
        fields.flag("norm_before_residual"),
    )


def _model(fields: ConfigFields, target: ModelConfig) -> ModelConfig:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.path}: num_key_value_heads {kv_heads} does not divide num_attention_heads"
            f" {heads}"
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{fields.path}: hidden_act of an EAGLE-3 head must be silu")
    head_dim = fields.size("head_dim", hidden // heads)
    # Its rotary table is as long as the target's context.
    rope, _ = read_rope_specs(fields, head_dim, target.context_length)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=target.context_length,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied_embeddings=False,
        eos_ids=target.eos_ids,
        activation="silu",
        norm_offset=0.0,
        norm_placement="pre",
        qk_norm="none",
        embedding_scale=1.0,
        attention_scale=head_dim**-0.5,
        attention_softcap=0.0,
        logits_softcap=0.0,
        windows=(0,),
        ropes=(rope,),
        layer_ropes=(0,),
        experts=None,
    )


def _feature_layers(fields: ConfigFields, target: ModelConfig) -> tuple[int, ...]:
    """Choose the target's layers whose inputs the head takes.

    By default, as heads are trained, these are layers 2, n / 2 and n - 3 of n. A checkpoint may
    list other layers whose *outputs* it takes; the result is then the layer after each.
    """
    eagle = fields.object("eagle_config")
    if not eagle.flag("use_aux_hidden_state", True):
        raise ConfigError(
            f"{fields.path}: a head that takes only the last layer (use_aux_hidden_state false) is"
            " not supported"
        )
    count = target.layers
    name = "eagle_aux_hidden_state_layer_ids"
    layers = eagle.list(name, FEATURE_LAYERS) or (1, count // 2 - 1, count - 4)
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < count:
            raise ConfigError(
                f"{fields.path}: {name} has {layer!r}, and the target has layers 0 to {count - 1}"
            )
    return tuple(layer + 1 for layer in layers)


def _same(fields: ConfigFields, name: str, wanted: int) -> None:
    found = fields.size(name)
    if found != wanted:
        raise ConfigError(
            f"{fields.path}: {name} is {found}, and the target's is {wanted}: the head was trained"
            " for another model"
        )
