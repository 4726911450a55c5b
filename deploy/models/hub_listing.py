"""Which files of a commit Baton needs, as the hub listed them: kept in Baton's cache.

A snapshot in the hub's cache may be another program's, or cut short. The listing shows without a
question to the hub whether it is complete.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.host.cache import cache_dir


class HubListing(BaseModel):
    """Names of files in the top folder of a commit."""

    model_config = ConfigDict(frozen=True)

    small: tuple[str, ...]
    """Configuration, tokenizer and templates."""
    weights: tuple[str, ...]

    @classmethod
    def read(cls, model_id: str, commit: str) -> Self | None:
        """The listing that was saved; None where there is none that can be read."""
        try:
            return cls.model_validate_json(_file(model_id, commit).read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, model_id: str, commit: str) -> None:
        """Keep it. Where the cache cannot be written, the hub is asked again next time."""
        file = _file(model_id, commit)
        draft = file.with_name(f"{file.name}.{uuid4().hex}")
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(self.model_dump_json())
            os.replace(draft, file)

    def is_in(self, folder: Path, *, weights: bool) -> bool:
        """Whether a snapshot has the small files and, if asked for, the weights."""
        names = self.small + self.weights if weights else self.small
        return all((folder / name).is_file() for name in names)


def _file(model_id: str, commit: str) -> Path:
    return cache_dir() / "hub" / model_id.replace("/", "--") / f"{commit}.json"
