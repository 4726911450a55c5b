"""The models on this machine: demo models by name, Hugging Face ids, folders and .gguf files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import ConfigError
from baton.host.cache import cache_dir
from deploy.models import demo_model, hub_model
from deploy.models.demo_model import KnownModel
from deploy.models.hub_download import DownloadWatch
from deploy.models.model_cache import (
    FORMS,
    converted,
    converted_folders,
    disk_errors,
    form_of,
    read_receipt,
)
from deploy.models.model_folder import check_folder
from engine.checkpoint.model_config import load_model_config

Progress = Callable[[str], None]
_HEADS = ("eagle", "medusa")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The folder of a model in Hugging Face's format, and the model's id in the API."""

    name: str
    path: Path
    commit: str = ""
    """Commit of a model of the hub; empty for any other model."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of a demo model, for those that its folder does not set."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of ``baton model list``: a model."""

    name: str
    cached: bool
    size: int
    """Size of the model on disk in bytes; 0 if the model is not cached."""
    source: str
    path: Path | None


def resolve(
    model: str,
    progress: Progress,
    quantization: str = "none",
    revision: str = "",
    watch: DownloadWatch | None = None,
    *,
    weights: bool = True,
) -> ResolvedModel:
    """Return the folder to serve for a folder, a .gguf file, a demo model's name or a Hugging Face
    id.

    An existing path has precedence. With the ``quantization`` ``auto`` a GGUF file keeps its codes;
    otherwise it is converted to bfloat16. ``revision`` is the branch, tag or commit of a Hugging
    Face id, or the commit of a demo model. If ``weights`` is false, weights are neither downloaded
    from the hub nor converted, and a folder may lack them. Raises ConfigError if the model is none
    of these, or if a part is missing or unsupported.
    """
    watch = watch or DownloadWatch()
    form = form_of(quantization, weights=weights)
    path = _path(model)
    if path is None and hub_model.is_id(model):
        found = hub_model.fetch(model, revision, progress, watch, weights=weights)
        return ResolvedModel(model, found.path, found.commit)
    if path is None and hub_model.is_commit(revision):
        known = _known(model)
        demo = demo_model.fetch_commit(known, revision, progress, watch, weights=weights)
        return ResolvedModel(model, demo.path, demo.commit, known.sampling)
    _refuse_revision(model, revision)
    if path is None:
        known = _known(model)
        demo = demo_model.fetch(known, form, progress, watch)
        return ResolvedModel(model, demo.path, demo.commit, known.sampling)
    if path.is_dir():
        check_folder(path, weights=weights)
        return ResolvedModel(path.resolve().name, path)
    with disk_errors():
        return ResolvedModel(path.stem, converted(path, form, progress))


def look(model: str, revision: str = "") -> ModelEntry:
    """Return which files of a model are on this machine; nothing is downloaded or converted.

    Raises ConfigError as ``resolve`` does.
    """
    path = _path(model)
    if path is None and hub_model.is_id(model):
        found = hub_model.cached(model, revision)
        if found is None:
            return ModelEntry(model, False, 0, "hub", None)
        return ModelEntry(model, True, _size(found.path), f"hub, {found.commit}", found.path)
    if path is None:
        known = _known(model)
        if not hub_model.is_commit(revision):
            _refuse_revision(model, revision)
        return _known_entry(known)
    _refuse_revision(model, revision)
    if path.is_dir():
        check_folder(path)
        return ModelEntry(path.name, True, _size(path), str(path), path)
    return ModelEntry(path.stem, True, path.stat().st_size, str(path), path)


def check(model: str, revision: str = "", max_model_len: int = 0) -> None:
    """Check what can be known of a model before anything is downloaded or converted.

    ``max_model_len`` is 0 for the model's own. Raises ConfigError as ``resolve`` does, and if the
    engine does not support a model that is here already.
    """
    found = look(model, revision).path
    if found is not None and found.is_dir():
        load_model_config(found, max_model_len)


def check_drafter(drafter: str, model: str, revision: str = "") -> None:
    """Check the draft model as ``check`` checks a model. Raises ConfigError."""
    if drafter in _HEADS:
        _heads_folder(drafter, model, revision)
    else:
        check(model, revision)


def download_folder(model: str) -> Path:
    """Return the folder to which a missing model is downloaded."""
    return hub_model.cache_folder() if hub_model.is_id(model) else cache_dir()


def list_models() -> list[ModelEntry]:
    """List the demo models, then converted GGUF files, then models in the hub's cache."""
    entries = [_known_entry(model) for model in demo_model.KNOWN_MODELS]
    listed = {entry.path for entry in entries}
    files = [
        ModelEntry(receipt.name, True, receipt.size, receipt.source, folder)
        for folder, receipt in converted_folders()
        if folder not in listed
    ]
    hub = [
        ModelEntry(one.model_id, True, one.size, f"hub, {one.commit}", one.path)
        for one in hub_model.list_cached()
        if one.path not in listed
    ]
    return entries + sorted(files, key=lambda entry: entry.name) + hub


def _path(model: str) -> Path | None:
    """Return the existing folder or .gguf file that ``model`` names; None if there is none."""
    path = Path(model).expanduser().absolute()
    exists = path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    return path if exists else None


def _known(model: str) -> KnownModel:
    known = demo_model.known_model(model)
    if known is None:
        raise _unknown(model)
    return known


def _unknown(model: str) -> ConfigError:
    names = [known.name for known in demo_model.KNOWN_MODELS]
    text = (
        f"no model {model!r}: there is no such folder or .gguf file, and it is neither a demo "
        f"model ({', '.join(names)}) nor a Hugging Face id (org/name, such as Qwen/Qwen3-0.6B)"
    )
    if model.endswith(".gguf") and hub_model.is_id(model.rpartition("/")[0]):
        repository, _, file = model.rpartition("/")
        return ConfigError(
            f"{text}. To get it from the hub: `hf download {repository} {file}`, then its path"
        )
    ids = {one.model_id for one in hub_model.list_cached()}
    ends = {name.rpartition("/")[2].lower(): name for name in (*sorted(ids), *names)}
    close = difflib.get_close_matches(model.lower(), ends, n=1, cutoff=0.75)
    return ConfigError(f"{text}. Did you mean {ends[close[0]]!r}?" if close else text)


def _known_entry(model: KnownModel) -> ModelEntry:
    found = (demo_model.cached(model, form) for form in FORMS)
    path = next((folder.path for folder in found if folder is not None), None)
    if path is None:
        return ModelEntry(model.name, False, 0, f"hub, {model.hub_id}", None)
    receipt = read_receipt(path)
    if receipt is None:
        return ModelEntry(model.name, True, _size(path), f"hub, {model.hub_id}", path)
    return ModelEntry(model.name, True, receipt.size, receipt.source, path)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def resolve_drafter(
    drafter: str,
    model: str,
    progress: Progress,
    revision: str = "",
    watch: DownloadWatch | None = None,
) -> ResolvedModel:
    """Return the folder of ``draft_model`` for a drafter, downloaded first if it is missing.

    ``revision`` is the branch, tag or commit of a draft model on the hub. For EAGLE-3 or Medusa
    heads, ``model`` must be a local folder. Raises ConfigError if that folder is missing, and
    BatonError as ``deploy.models.model_store.resolve`` does.
    """
    if drafter not in _HEADS:
        return resolve(model, progress, "auto", revision, watch)
    path = _heads_folder(drafter, model, revision)
    return ResolvedModel(path.name, path)


def _heads_folder(drafter: str, model: str, revision: str) -> Path:
    if revision:
        raise ConfigError(f"draft_revision {revision!r}: the heads of {drafter} are a folder")
    path = Path(model).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"draft_model {model!r}: the heads of drafter {drafter} are a folder")
    return path


def _refuse_revision(model: str, revision: str) -> None:
    if revision:
        raise ConfigError(
            f"revision {revision!r} is only for a Hugging Face id, and {model!r} is not one"
        )
