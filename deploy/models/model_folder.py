"""Checks of a folder that is served as a Hugging Face model."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.checkpoint.families import family_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise ConfigError unless ``folder`` holds a complete model of a supported architecture.

    If ``weights`` is false, the folder may lack the weight files.
    """
    names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if weights and not weight_files(names):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{folder} is not a Hugging Face model: no {', no '.join(missing)}")
    family_of(ConfigFields.read(folder / "config.json"))
    if not weights or WEIGHTS in names:
        return
    if INDEX in names:
        needed, source = shards(folder / INDEX), "its index names"
    else:
        needed, source = _numbered(names), "the others' names imply"
    if lost := [name for name in needed if name not in names]:
        raise ConfigError(f"{folder} lacks shards that {source}: {', '.join(lost)}")


def _numbered(names: Collection[str]) -> list[str]:
    """Return the names of all weight shards of a model, from the names of some. Each name contains
    the number of shards."""
    counts = {(found[1], found[2]) for name in names if (found := _SHARD.fullmatch(name))}
    return [
        f"{stem}-{number:05}-of-{count}.safetensors"
        for stem, count in sorted(counts)
        for number in range(1, int(count) + 1)
    ]


def check_config(folder: Path, *, weights: bool = True) -> None:
    """Raise ConfigError unless the engine supports the model in ``config.json``.

    This needs no other file, so it can run before weights are downloaded. If ``weights`` is false,
    the format of quantized weights is not checked, and torch is not needed.
    """
    from engine.checkpoint.model_config import load_model_config  # noqa: PLC0415

    load_model_config(folder)
    fields = ConfigFields.read(folder / "config.json")
    is_quantized = fields.get("quantization_config") or fields.get("compression_config")
    if weights and is_quantized:
        # The import loads torch, which plain weights do not need here.
        from engine.quantization.checkpoint_format import checkpoint_format  # noqa: PLC0415

        checkpoint_format(folder)


def shards(index: Path) -> list[str]:
    """Return the names of the weight files that an index file lists, sorted.

    Raises ConfigError for a broken index.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{index} names no files of its folder")
    return names


def weight_files(names: Collection[str]) -> list[str]:
    """Return which of a folder's files are the weights if no index lists them; empty if there are
    none.

    ``consolidated*`` is a copy of the weights in another format.
    """
    if WEIGHTS in names:
        return [WEIGHTS]
    return sorted(
        name
        for name in names
        if name.endswith(".safetensors") and not name.startswith("consolidated")
    )
