"""Where a drafter's model lies: a smaller model by its name or path, trained heads by theirs."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError
from deploy.models.hub_download import DownloadWatch
from deploy.models.model_store import Progress, ResolvedModel, resolve

_HEADS = ("eagle", "medusa")


def resolve_drafter(
    drafter: str,
    model: str,
    progress: Progress,
    revision: str = "",
    watch: DownloadWatch | None = None,
) -> ResolvedModel:
    """The folder of ``draft_model`` for a drafter, downloaded first where it is not here.

    ``revision`` is the branch, tag or commit of a draft model of the hub. Heads have no tokenizer
    and no name: they are a folder of the target's own. Raises ConfigError where there is none,
    BatonError as ``deploy.models.model_store.resolve`` does.
    """
    if drafter not in _HEADS:
        return resolve(model, progress, "auto", revision, watch)
    if revision:
        raise ConfigError(f"draft_revision {revision!r}: the heads of {drafter} are a folder")
    path = Path(model).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"draft_model {model!r}: the heads of drafter {drafter} are a folder")
    return ResolvedModel(path.name, path)
