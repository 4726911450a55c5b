"""The model as clients know it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.config.choices import GenerationConfig
from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from baton.hashing import text_hash

_UNKNOWN_CONTEXT = 1 << 20
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that a cluster serves."""

    id: str
    created: int
    """Unix time in seconds at which this router read the model. Clients get it as the creation
    time."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""
    embedding_size: int
    """Number of values in an embedding."""
    revision: str = ""
    """The commit of the model's repository; empty if the model is a local folder or file."""
    tokenizer: str = ""
    """Hash of the tokenizer and its chat template, as ``text_hash`` computes it."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of requests that do not set them, such as ``temperature`` and
    ``max_tokens``."""

    @classmethod
    def of(
        cls,
        name: str,
        folder: Path,
        max_model_len: int = 0,
        revision: str = "",
        generation_config: GenerationConfig = "auto",
        sampling: Mapping[str, float] | None = None,
    ) -> ServedModel:
        """Read the model from the ``config.json`` of a Hugging Face folder. Raises ConfigError.

        ``max_model_len``: the maximum context length in tokens; 0 means the model's own. The
        workers may report a smaller one. ``generation_config``: as in the configuration.
        ``sampling``: defaults for parameters that the folder's generation_config.json lacks.
        """
        whole = ConfigFields.read(folder / "config.json")
        # A model for text and images has a separate section for text.
        fields = whole.object("text_config") if whole.get("text_config") else whole
        # If the file omits it, the architecture's default applies, which the workers report.
        context = fields.context_length(_UNKNOWN_CONTEXT)
        bounded = min(context, max_model_len or context)
        size = fields.size("hidden_size")
        defaults: dict[str, float] = {}
        if generation_config == "auto":
            defaults = {**(sampling or {}), **read_sampling(folder)}
        created = int(time.time())
        return cls(name, created, bounded, size, revision, text_hash(folder), defaults)


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in a model's ``generation_config.json`` by the names that
    requests have for them. Raises ConfigError for a value that is not a number.

    As in vLLM, ``do_sample`` does not count.
    """
    fields = ConfigFields.read_if_any(folder / "generation_config.json")
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(
            value, int if name == "top_k" else int | float
        ):
            raise ConfigError(f"{fields.path}: {name} must be a number, and is {value!r}")
        found[name] = value
    if fields.get("max_new_tokens") is not None:
        found["max_tokens"] = fields.size("max_new_tokens")
    return found
