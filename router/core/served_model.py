"""The model as clients know it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from baton.config_fields import ConfigFields
from baton.hashing import text_hash

_UNKNOWN_CONTEXT = 1 << 20


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

    @classmethod
    def of(cls, name: str, folder: Path, max_model_len: int = 0, revision: str = "") -> ServedModel:
        """Read the model from the ``config.json`` of a Hugging Face folder. Raises ConfigError.

        ``max_model_len``: the maximum context length in tokens; 0 means the model's own. The
        workers may report a smaller one."""
        whole = ConfigFields.read(folder / "config.json")
        # A model for text and images has a separate section for text.
        fields = whole.object("text_config") if whole.get("text_config") else whole
        # If the file omits it, the architecture's default applies, which the workers report.
        context = fields.context_length(_UNKNOWN_CONTEXT)
        bounded = min(context, max_model_len or context)
        size = fields.size("hidden_size")
        return cls(name, int(time.time()), bounded, size, revision, text_hash(folder))
