"""Which files of a model's folder are its weights, and how their tensors are named.

Savers write other files next to the weights, and other names than transformers has: those of the
bare decoder, or with the prefix of a wrapper.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from baton.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_OTHERS = ("consolidated", "adapter_", "optimizer", "scheduler", "training_", "rng_state")
"""Beginnings of the names of other files: a copy of the weights in another format, an adapter, and
the state of a training."""
_EMBEDDING = re.compile(r"((?:.+\.)?)embed_tokens\.")
_HEAD = re.compile(r"((?:.+\.)?)((?:tied_)?lm_head\..+)")
_DECODER = "model."
"""Prefix of a decoder's names in transformers."""
_PARTS = ("embed_tokens.", "layers.", "norm.")
"""Beginnings of the names of a decoder's tensors, after its prefix."""


def weight_files(names: Collection[str]) -> list[str]:
    """Return which of a folder's files are the weights if no index lists them; empty if there are
    none. Shards of ``model`` go before files with other names."""
    if WEIGHTS in names:
        return [WEIGHTS]
    found = sorted(
        name for name in names if name.endswith(".safetensors") and not name.startswith(_OTHERS)
    )
    return [name for name in found if _stem(name) == "model"] or found


def _stem(name: str) -> str:
    found = _SHARD.fullmatch(name)
    return "" if found is None else found[1]


def numbered_shards(names: Collection[str]) -> list[str]:
    """Return the names of all weight shards of a model, from the names of some. Each name contains
    the number of shards."""
    counts = {(found[1], found[2]) for name in names if (found := _SHARD.fullmatch(name))}
    return [
        f"{stem}-{number:05}-of-{count}.safetensors"
        for stem, count in sorted(counts)
        for number in range(1, int(count) + 1)
    ]


def shards(index: Path) -> list[str]:
    """Return the names of the weight files that an index file lists, sorted.

    Raises ConfigError for a broken index.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{index} must name files of its own folder")
    return names


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files of a model's folder. Raises ConfigError if there are none, or if some
    are missing."""
    names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
    if WEIGHTS not in names and INDEX in names:
        needed, source = shards(folder / INDEX), f"{INDEX} lists"
    else:
        needed = weight_files(names)
        needed = sorted({*needed, *numbered_shards(needed)})
        source = "the names of the others imply"
    if not needed:
        raise ConfigError(f"{folder} has no *.safetensors file{adapter_note(names)}")
    if missing := [name for name in needed if name not in names]:
        raise ConfigError(f"{folder} lacks shards that {source}: {', '.join(missing)}")
    return [folder / name for name in needed]


def adapter_note(names: Collection[str]) -> str:
    """Return the end of an error about a folder without weights, from the names of its files: what
    to do if it is an adapter."""
    if ADAPTER not in names:
        return ""
    return (
        ": it is an adapter (LoRA), not a model. Merge it into its base model (merge_and_unload"
        " and save_pretrained of PEFT), and serve the merged folder"
    )


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Map the names of a decoder's tensors, and of its head, to those of transformers
    (``model.layers.0.…``, ``lm_head.weight``).

    The decoder is found by its embedding: the one that has layers next to it. Other tensors, such
    as those of an encoder of images, are left out. Without such an embedding all names are kept.
    """
    found = {match[1] for name in names if (match := _EMBEDDING.match(name))}
    layered = [p for p in found if any(name.startswith(f"{p}layers.0.") for name in names)]
    if not layered:
        return {name: name for name in names}
    prefix = min(layered, key=lambda one: (len(one), one))
    plain = {}
    for name in names:
        head = _HEAD.fullmatch(name)
        if head is not None and prefix.startswith(head[1]):
            plain[name] = head[2]
        elif name.startswith(tuple(prefix + part for part in _PARTS)):
            plain[name] = _DECODER + name.removeprefix(prefix)
    return plain
