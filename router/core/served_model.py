"""The model as clients know it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

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
        """Read the model from the ``config.json`` of a Hugging Face folder.

        ``max_model_len``: the maximum context length in tokens; 0 means the model's own. The
        workers may report a smaller one."""
        whole = json.loads((folder / "config.json").read_text())
        # A model for text and images has a separate section for text.
        fields = whole.get("text_config") or whole
        # If the file omits it, the architecture's default applies, which the workers report.
        context = int(fields.get("max_position_embeddings") or _UNKNOWN_CONTEXT)
        bounded = min(context, max_model_len or context)
        return cls(
            name, int(time.time()), bounded, int(fields["hidden_size"]), revision, text_hash(folder)
        )
