"""The cache folder, for things that can be made again: models, built kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $BATON_CACHE_DIR, else $XDG_CACHE_HOME/baton, else ~/.cache/baton."""
    if own := os.environ.get("BATON_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "baton"
    return Path.home() / ".cache" / "baton"
