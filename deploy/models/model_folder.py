"""Checks of a folder that is served as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.checkpoint.families import family_of
from engine.checkpoint.weight_files import adapter_note, weight_files, weight_paths


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise ConfigError unless ``folder`` holds a complete model of a supported architecture.

    If ``weights`` is false, the folder may lack the weight files.
    """
    names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if weights and not weight_files(names):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"{folder} is not a Hugging Face model: no {', no '.join(missing)}{adapter_note(names)}"
        )
    family_of(ConfigFields.read(folder / "config.json"))
    if weights:
        weight_paths(folder)


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
