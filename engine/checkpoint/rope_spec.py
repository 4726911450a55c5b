"""Reads and checks the rotary position embedding of a ``config.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.config_fields import ConfigFields
from baton.errors import ConfigError

_KNOWN = "default, dynamic, linear, llama3, longrope, yarn"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary scaling that divides every frequency by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Rotary scaling that raises the base (dynamic NTK).

    As in vLLM, every position has the base of the whole extended context, however short a prompt
    is: cached keys must not change when their sequence grows.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3.1: low frequencies are divided by a factor, high ones are kept, and
    those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Rotary scaling with a separate divisor for each frequency (Ding et al., LongRoPE, 2024).

    If the served context exceeds ``original_context``, ``long_factors`` apply to every position,
    however short a prompt is: cached keys must not change when their sequence grows.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Rotary scaling that blends original and divided frequencies, by the number of turns that a
    dimension makes within the original context.

    The blend is between ``beta_slow`` and ``beta_fast`` turns (Peng et al., YaRN, 2023).
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the bounds of the blend are rounded to whole dimensions."""


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | LongRopeScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Specification of a rotary table: its base, the number of leading dimensions of a head that
    are rotated, and its scaling."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None


def read_rope_specs(fields: ConfigFields, head_dim: int, context: int) -> tuple[RopeSpec, RopeSpec]:
    """Read the rotary tables' specifications for layers with full and with sliding attention; they
    are often the same. ``context``: ``max_position_embeddings``, in tokens.

    Raises ConfigError for an unsupported scaling.
    """
    scaling, parameters = fields.object("rope_scaling"), fields.object("rope_parameters")
    nested = parameters.get("full_attention") or parameters.get("sliding_attention")
    local_theta = fields.optional_number("rope_local_base_freq")
    if not nested and not local_theta:
        # The order in which transformers looks.
        spec = _read_spec(scaling if scaling.values else parameters, fields, head_dim, context)
        return spec, spec
    full = scaling.over(parameters.object("full_attention").values)
    sliding = parameters.object("sliding_attention")
    if local_theta:
        sliding = sliding.over({"rope_theta": local_theta})
    return (
        _read_spec(full, fields, head_dim, context),
        _read_spec(sliding, fields, head_dim, context),
    )


def _read_spec(rope: ConfigFields, fields: ConfigFields, head_dim: int, context: int) -> RopeSpec:
    part = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"{rope.path}: {rotary_dim} of head_dim {head_dim} cannot be rotated in pairs"
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    return RopeSpec(theta, rotary_dim, _read_scaling(rope, fields, rotary_dim, context))


def _read_scaling(
    rope: ConfigFields, fields: ConfigFields, rotary_dim: int, context: int
) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "dynamic" and rotary_dim > 2:
        return DynamicScaling(rope.number("factor"))
    outer = fields.get("original_max_position_embeddings")
    original = (rope if outer is None else fields).size("original_max_position_embeddings", context)
    if kind == "llama3":
        return Llama3Scaling(
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            original,
        )
    factor = rope.number("factor", context / original)
    # Phi-3's first files called their scaling "su", and some "yarn".
    if kind in {"longrope", "su"} or (kind == "yarn" and rope.get("long_factor") is not None):
        return _longrope(rope, rotary_dim, original, factor)
    if kind == "yarn":
        return YarnScaling(
            factor,
            original,
            rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
            rope.number("beta_fast", 32.0),
            rope.number("beta_slow", 1.0),
            rope.flag("truncate", True),
        )
    raise ConfigError(f"{rope.path}: rope scaling {kind} is not supported; known: {_KNOWN}")


def _longrope(rope: ConfigFields, rotary_dim: int, original: int, factor: float) -> LongRopeScaling:
    short, long = (_factors(rope, name, rotary_dim) for name in ("short_factor", "long_factor"))
    paper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(short, long, original, rope.number("attention_factor", paper))


def _factors(rope: ConfigFields, name: str, rotary_dim: int) -> tuple[float, ...]:
    found = rope.list(name, rotary_dim // 2)
    if not found or not all(isinstance(x, int | float) and x > 0 for x in found):
        raise ConfigError(f"{rope.path}: {name} must be {rotary_dim // 2} numbers above 0")
    return tuple(float(x) for x in found)


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if scale and all_dim:
        return magnitude(scale) / magnitude(all_dim)
    return magnitude(1.0)
