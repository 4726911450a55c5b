"""Where a drafter's model lies: a smaller model by its name or path, trained heads by theirs."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError
from deploy.hub_download import DownloadWatch
from deploy.model_store import Progress, resolve

_HEADS = ("eagle", "medusa")


def drafter_folder(
    drafter: str, model: str, progress: Progress, watch: DownloadWatch | None = None
) -> Path:
    """The folder of ``draft_model`` for a drafter, downloaded first where it is not here.

    Heads have no tokenizer and no name: they are a folder of the target's own. Raises ConfigError
    where there is none, BatonError as ``deploy.model_store.resolve`` does.
    """
    if drafter not in _HEADS:
        return resolve(model, progress, "auto", watch=watch).path
    path = Path(model).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"draft_model {model!r}: the heads of drafter {drafter} are a folder")
    return path
