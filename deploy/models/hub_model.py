"""Models of the Hugging Face hub, served from the hub's own cache.

``huggingface_hub`` downloads and caches. Its environment variables apply: HF_HOME, HF_HUB_CACHE,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import ConfigError
from baton.hashing import TEMPLATE_FOLDER
from baton.host.cache import cache_dir
from deploy.models.hub_download import ASK_S, DownloadWatch, HubDownload, explained, reason
from deploy.models.model_cache import disk_errors, locked
from deploy.models.model_folder import check_config, check_folder
from engine.checkpoint.weight_files import INDEX, WEIGHTS, adapter_note, shards, weight_files

_CACHED_ASK_S = 4.0
"""Deadline of each request to the hub in seconds, if the model is cached."""
_ID = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A complete snapshot in the hub's cache."""

    model_id: str
    commit: str
    path: Path
    size: int = 0
    """Size of the snapshot on disk in bytes; 0 if it was not computed."""
    is_compared: bool = False
    """Whether the snapshot's files were compared with the hub's list."""


def is_id(text: str) -> bool:
    """Whether the text has the form ``org/name`` of a Hugging Face model id."""
    return _ID.fullmatch(text) is not None and not text.endswith(".gguf")


def is_commit(revision: str) -> bool:
    """Whether ``revision`` is the full hash of a commit, not a branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


def cache_folder() -> Path:
    """Return the hub's cache, which HF_HUB_CACHE or HF_HOME sets."""
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def cached(model_id: str, revision: str = "", *, weights: bool = True) -> HubModel | None:
    """Return the complete snapshot of a branch, tag or commit in the cache, without a request.

    If ``weights`` is false, the snapshot may lack the weight files.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    config = try_to_load_from_cache(model_id, "config.json", cache_folder(), revision or _MAIN)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    listing = HubListing.read(model_id, folder.name)
    if listing is not None and not listing.is_in(folder, weights=weights):
        return None
    try:
        check_folder(folder, weights=weights)
    except ConfigError:
        return None
    return HubModel(model_id, folder.name, folder, is_compared=listing is not None)


def list_cached() -> Iterator[HubModel]:
    """Yield the complete snapshots in the cache that Baton can serve."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415

    folder = cache_folder()
    repos = scan_cache_dir(folder).repos if folder.is_dir() else ()
    for repo in sorted(repos, key=lambda one: one.repo_id):
        for one in sorted(repo.revisions, key=lambda one: one.commit_hash):
            found = cached(repo.repo_id, one.commit_hash) if repo.repo_type == "model" else None
            if found is not None:
                yield HubModel(repo.repo_id, found.commit, found.path, one.size_on_disk)


def fetch(
    model_id: str,
    revision: str,
    progress: Callable[[str], None],
    watch: DownloadWatch,
    *,
    weights: bool = True,
) -> HubModel:
    """Return the model's snapshot, downloaded first if the cache lacks a part of it.

    The hub is asked for the revision's commit and, once for each commit, for its files. Without an
    answer, or if a newer commit cannot be downloaded, a cached snapshot is used. If ``weights`` is
    false, all files except the weights are downloaded.

    Raises ConfigError if the model is unavailable or cannot be served. This happens before weights
    are downloaded, if ``config.json`` and the list of files show it. Raises ``Cancelled`` when
    ``watch`` is cancelled.
    """
    from huggingface_hub import constants  # noqa: PLC0415

    revision = revision or _MAIN
    here = cached(model_id, revision, weights=weights)
    if here is not None and (
        constants.HF_HUB_OFFLINE or (is_commit(revision) and here.is_compared)
    ):
        return here
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{model_id} at {revision} is not complete in {cache_folder()}, and HF_HUB_OFFLINE is "
            f"set: unset it, or run `hf download {model_id}` on a machine with a network, copy the "
            "folder that it prints, and pass its path"
        )
    _quiet_library()
    wait_s = ASK_S if here is None else _CACHED_ASK_S
    try:
        commit = revision
        if not is_commit(revision):
            commit = _within(wait_s, lambda: _commit(model_id, revision))
        if here is not None and here.commit == commit and here.is_compared:
            return here
        sizes = _within(wait_s, lambda: _sizes(model_id, commit, wait_s))
    except Exception as error:
        if here is None:
            raise explained(error, model_id, revision) from None
        progress(f"cannot reach the hub ({reason(error)}): using the cached {here.commit}")
        return here
    if here is not None and here.commit == commit and _is_whole(here, sizes, weights=weights):
        return here
    try:
        with (
            disk_errors(),
            locked(f"hub-{model_id.replace('/', '--')}", progress),
            disk_errors(cache_folder(), "HF_HOME"),
        ):
            found = cached(model_id, commit, weights=weights)
            if found is None or not found.is_compared:
                found = _download(model_id, commit, sizes, progress, watch, weights=weights)
            if weights or cached(model_id, revision) is None:
                _set_ref(found, revision)
            return found
    except ConfigError as error:
        if here is None or here.commit == commit:
            raise
        progress(
            f"cannot get the newer commit {commit} ({error.message}): using the cached "
            f"{here.commit}"
        )
        return here


def _commit(model_id: str, revision: str) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    url = hf_hub_url(model_id, "config.json", revision=revision)
    commit = get_hf_file_metadata(url, timeout=_CACHED_ASK_S).commit_hash
    if commit is None:
        raise ConfigError(
            "the server that answers is not the Hugging Face hub (no X-Repo-Commit): check "
            "HF_ENDPOINT and proxies"
        )
    return commit


def _sizes(model_id: str, commit: str, wait_s: float) -> dict[str, int]:
    """Return the files of a commit, and their sizes in bytes."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    about = HfApi().model_info(model_id, revision=commit, files_metadata=True, timeout=wait_s)
    return {one.rfilename: one.size or 0 for one in about.siblings or ()}


def _is_whole(here: HubModel, sizes: Mapping[str, int], *, weights: bool) -> bool:
    """Return whether a snapshot has all files on the hub's list that Baton needs.

    If the snapshot has them, the hub's list is saved for later starts.
    """
    with contextlib.suppress(ConfigError):
        listing = _listing(here.model_id, sizes, here.path)
        if listing.is_in(here.path, weights=weights):
            listing.save(here.model_id, here.commit)
            return True
    return False


def _download(
    model_id: str,
    commit: str,
    sizes: Mapping[str, int],
    progress: Callable[[str], None],
    watch: DownloadWatch,
    *,
    weights: bool,
) -> HubModel:
    """Download a snapshot by its commit's hash, so that the cache's branches do not change before
    the end."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    def config_file() -> str:
        return hf_hub_download(
            model_id, "config.json", revision=commit, cache_dir=cache_folder(), etag_timeout=ASK_S
        )

    try:
        folder = Path(_within(2 * ASK_S, config_file)).parent
        check_config(folder, weights=weights)
    except Exception as error:
        raise explained(error, model_id, commit) from None
    _check_files(model_id, sizes)
    download = HubDownload(model_id, commit, cache_folder(), progress, watch)
    download.fetch({name: sizes[name] for name in _small_files(sizes)})
    listing = _listing(model_id, sizes, folder)
    listing.save(model_id, commit)
    if weights:
        download.fetch({name: sizes[name] for name in listing.weights})
    check_folder(folder, weights=weights)
    return HubModel(model_id, commit, folder, is_compared=True)


def _listing(model_id: str, sizes: Mapping[str, int], folder: Path) -> HubListing:
    """Return the names of the files of a commit that Baton needs; ``folder`` has the index of its
    weights, if any."""
    by_index = WEIGHTS not in sizes and INDEX in sizes
    weights = shards(folder / INDEX) if by_index else weight_files(_top(sizes))
    if lost := [name for name in weights if name not in sizes]:
        raise ConfigError(f"{model_id} lacks shards that its index names: {', '.join(lost)}")
    return HubListing(texts=tuple(_small_files(sizes)), weights=tuple(weights))


def _set_ref(found: HubModel, revision: str) -> None:
    """Record in the cache which commit a branch or tag points to, as ``huggingface_hub`` does.
    Later starts without a network use this."""
    if revision == found.commit:
        return
    ref = found.path.parents[1] / "refs" / revision
    if ref.is_file() and ref.read_text() == found.commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    draft = ref.with_name(f"{ref.name}.{uuid4().hex[:8]}.tmp")
    draft.write_text(found.commit)
    os.replace(draft, ref)


def _top(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are in the top folder. Subfolders hold other formats of the
    same model."""
    return [name for name in names if "/" not in name]


def _small_files(names: Iterable[str]) -> list[str]:
    endings = (".json", ".jinja")
    return [
        name
        for name in names
        if fnmatchcase(name, f"{TEMPLATE_FOLDER}/*.jinja")
        or ("/" not in name and (name.endswith(endings) or name.startswith("tokenizer")))
    ]


def _check_files(model_id: str, names: Iterable[str]) -> None:
    top = _top(names)
    if note := adapter_note(top) if not weight_files(top) else "":
        raise ConfigError(f"{model_id} has no *.safetensors file of a model{note}")
    if not weight_files(top):
        others = sorted(name for name in top if name.endswith((".bin", ".gguf", ".pth")))
        raise ConfigError(
            f"{model_id} has no *.safetensors file"
            + (f" (only {', '.join(others[:3])})" if others else "")
            + (
                ": use a repository that has one, convert it "
                "(https://huggingface.co/spaces/safetensors/convert), or pass the path of a GGUF "
                "file of Llama architecture"
            )
        )
    if "tokenizer.json" not in top:
        raise ConfigError(
            f"{model_id} has no tokenizer.json, which Baton needs: make it with transformers "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)) in a copy of the model"
        )


def _quiet_library() -> None:
    """Turn off the log of ``huggingface_hub``. It contains addresses of files, which may carry a
    signature."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if "HF_HUB_VERBOSITY" not in os.environ:
        from huggingface_hub.utils import logging as library_logging  # noqa: PLC0415

        library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


Outcome = TypeVar("Outcome")


def _within(seconds: float, work: Callable[[], Outcome]) -> Outcome:
    """Call ``work`` and return its result; raises what it raises, and TimeoutError after
    ``seconds``.

    The call runs on a separate thread, because name lookups have no timeout. The thread cannot
    block the exit of the process.
    """
    outcome: Future[Outcome] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(timeout=seconds)


class HubListing(BaseModel):
    """Names of the files of a commit that Baton needs."""

    model_config = ConfigDict(frozen=True)

    texts: tuple[str, ...]
    """Names of the files of configuration, tokenizer and templates. Older versions saved another
    field, ``small``, that lacks templates in a folder of their own. Such a listing is not read."""
    weights: tuple[str, ...]

    @classmethod
    def read(cls, model_id: str, commit: str) -> Self | None:
        """Return the saved listing of a commit; None if there is none that can be read."""
        try:
            return cls.model_validate_json(_file(model_id, commit).read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, model_id: str, commit: str) -> None:
        """Save the listing. If the cache cannot be written, the next start asks the hub again."""
        file = _file(model_id, commit)
        draft = file.with_name(f"{file.name}.{uuid4().hex}")
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(self.model_dump_json())
            os.replace(draft, file)

    def is_in(self, folder: Path, *, weights: bool) -> bool:
        """Whether a snapshot in ``folder`` has the text files of this listing and, if requested,
        the weights."""
        names = self.texts + self.weights if weights else self.texts
        return all((folder / name).is_file() for name in names)


def _file(model_id: str, commit: str) -> Path:
    return cache_dir() / "hub" / model_id.replace("/", "--") / f"{commit}.json"
