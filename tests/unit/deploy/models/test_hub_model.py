"""The real huggingface_hub against a small hub of our own."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from baton.host.cache import cache_dir
from deploy.models import hub_download, hub_model, model_store
from deploy.models.hub_download import Cancelled, DownloadWatch
from deploy.models.model_store import look, resolve
from tests.support.hub_stub import SIGNATURE, TOKEN, HubStub, files_of
from tests.support.models import make_tiny_model

ID = "tests/tiny-llama"
ROOT = Path(model_store.__file__).parents[2]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub, and of Baton, for each test."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "baton"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "hf" / "tokens"))
    return tmp_path / "hf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the hub has of the model: two shards, and files that Baton does not need."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:8], "model-2.safetensors": names[8:]}
    for shard, of_it in shards.items():
        save_file({name: weights[name] for name in of_it}, folder / shard)
    index = {"weight_map": {name: shard for shard, of_it in shards.items() for name in of_it}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(weights, folder / "consolidated.safetensors")
    for name in ("README.md", "pytorch_model.bin", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not needed")
    return folder


NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-1.safetensors",
    "model-2.safetensors",
}


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub() as stub:
        stub.add(ID, folder)
        urls = f"{stub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        yield stub
        huggingface_hub.close_session()


class Told(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def main_of(hub: HubStub) -> str:
    return hub.models[ID].refs["main"]


def refused(model: str = ID, revision: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(model, Told(), "none", revision)
    return caught.value.message


def test_an_id_is_downloaded_with_the_needed_files_only(hub: HubStub, folder: Path) -> None:
    told = Told()
    model = resolve(ID, told)
    assert (model.name, model.commit) == (ID, main_of(hub))
    assert {file.name for file in model.path.iterdir()} == NEEDED
    assert files_of(model.path) == {name: (folder / name).read_bytes() for name in NEEDED}
    shards = sum((folder / f"model-{n}.safetensors").stat().st_size for n in (1, 2))
    assert any(f"{hub_download.size_text(shards)} in 2 files of {ID}" in line for line in told)


def test_a_cached_model_takes_one_question(hub: HubStub) -> None:
    first = resolve(ID, Told())
    hub.seen.clear()
    shutil.rmtree(cache_dir() / "locks")
    told = Told()
    assert resolve(ID, told) == first
    assert not (cache_dir() / "locks").exists(), "it waits for no download"
    assert [(one.method, one.path) for one in hub.seen] == [
        ("HEAD", f"/{ID}/resolve/main/config.json")
    ]
    assert told == []


def test_a_cached_commit_takes_none(hub: HubStub) -> None:
    first = resolve(ID, Told())
    hub.seen.clear()
    assert resolve(ID, Told(), "none", first.commit) == first
    assert hub.seen == []


def test_what_other_programs_have_downloaded_is_taken(hub: HubStub) -> None:
    there = ""
    for name in NEEDED:
        there = str(Path(huggingface_hub.hf_hub_download(ID, name)).parent)
    hub.seen.clear()
    assert resolve(ID, Told()).path == Path(there)
    assert hub.downloads() == []
    hub.seen.clear()
    assert resolve(ID, Told()).path == Path(there)
    assert len(hub.seen) == 1, "its files were compared with the hub's before"


@pytest.mark.parametrize(
    "there",
    [
        {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors"},
        {"config.json", "tokenizer.json", "consolidated.safetensors"},
        NEEDED - {"tokenizer_config.json"},
        NEEDED - {"chat_template.jinja"},
    ],
    ids=["one shard, no index", "another format", "no tokenizer settings", "no chat template"],
)
@pytest.mark.parametrize("pinned", [False, True])
def test_what_another_program_has_left_out_is_downloaded(
    hub: HubStub, folder: Path, there: set[str], pinned: bool
) -> None:
    files = files_of(folder)
    needed = set(NEEDED)
    if "model-00001-of-00002.safetensors" in there:
        names = {f"model-{n}.safetensors": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
        files = {names.get(name, name): data for name, data in files.items()}
        index = json.loads(files["model.safetensors.index.json"])
        weight_map = {key: names[name] for key, name in index["weight_map"].items()}
        files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
        needed = {names.get(name, name) for name in NEEDED}
        hub.models[ID].commit(files)
    for name in there:
        huggingface_hub.hf_hub_download(ID, name)
    model = resolve(ID, Told(), "none", main_of(hub) if pinned else "")
    assert {file.name for file in model.path.iterdir()} == needed | there


@pytest.mark.parametrize("there", ["model-00001-of-00002.safetensors", "consolidated.safetensors"])
def test_a_part_of_the_weights_is_no_model_offline(
    hub: HubStub, folder: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[ID].commit(files_of(folder) | {"model-00001-of-00002.safetensors": b"1"})
    for name in ("config.json", "tokenizer.json", there):
        huggingface_hub.hf_hub_download(ID, name)
    assert look(ID).cached is False
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not complete in" in refused()


def test_without_a_network_an_uncompared_snapshot_is_taken(hub: HubStub) -> None:
    for name in NEEDED - {"chat_template.jinja"}:
        huggingface_hub.hf_hub_download(ID, name)
    commit = main_of(hub)
    hub.close()
    huggingface_hub.close_session()
    told = Told()
    assert resolve(ID, told, "none", commit).commit == commit
    assert "cannot reach the hub" in told[0]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubStub, folder: Path) -> None:
    model = hub.models[ID]
    other = files_of(folder) | {"chat_template.jinja": b"another"}
    commit = model.commit(other, "v2")
    resolved = resolve(ID, Told(), "none", "v2")
    assert resolved.commit == commit
    assert (resolved.path / "chat_template.jinja").read_bytes() == b"another"
    hub.seen.clear()
    old = resolve(ID, Told(), "none", main_of(hub))
    assert old.commit == main_of(hub) != commit
    assert hub.downloads(".safetensors") == [], "the same weights are there already"


def test_a_branch_that_moves_is_followed(hub: HubStub, folder: Path) -> None:
    first = resolve(ID, Told())
    hub.models[ID].commit(files_of(folder) | {"chat_template.jinja": b"new"})
    second = resolve(ID, Told())
    assert second.commit == main_of(hub) != first.commit
    assert look(ID).path == second.path, "offline, too"


@pytest.mark.parametrize("status", [429, 403, 500])
def test_an_update_that_fails_leaves_the_cached_commit(
    hub: HubStub, folder: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=waits.append))
    first = resolve(ID, Told())
    shard = (folder / "model-2.safetensors").read_bytes()
    hub.models[ID].commit(files_of(folder) | {"model-2.safetensors": shard + b"\0"})
    hub.refused["model-2.safetensors"] = status
    told = Told()
    assert resolve(ID, told) == first
    assert bool(waits) == (status == 429), "it is asked again where that may help"
    lines = [line for line in told if "cannot get the newer commit" in line]
    assert len(lines) == 1
    assert f"the newer commit {main_of(hub)}" in lines[0]
    assert f"using the cached {first.commit}" in lines[0]
    assert look(ID).path == first.path, "the branch names the complete snapshot"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(ID, Told()) == first
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.refused.clear()
    assert resolve(ID, Told()).commit == main_of(hub)


def test_an_update_that_the_disk_has_no_room_for_leaves_the_cached_commit(
    hub: HubStub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(ID, Told())
    shard = (folder / "model-2.safetensors").read_bytes()
    hub.models[ID].commit(files_of(folder) | {"model-2.safetensors": shard + b"\0"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 20, 1 << 20, 1000))
    told = Told()
    assert resolve(ID, told) == first
    assert "are missing. Free some space" in told[-1]


def test_a_router_gets_the_small_files_of_a_commit(hub: HubStub, folder: Path) -> None:
    first = main_of(hub)
    hub.models[ID].commit(files_of(folder) | {"chat_template.jinja": b"new"})
    small = resolve(ID, Told(), "none", first, weights=False)
    names = {name for name in NEEDED if not name.endswith(".safetensors")}
    assert {file.name for file in small.path.iterdir()} == names
    assert small.commit == first
    assert hub.downloads(".safetensors") == []
    assert look(ID, first).cached is False, "to a worker it is not complete"
    hub.seen.clear()
    assert resolve(ID, Told(), "none", first, weights=False) == small
    assert hub.seen == []


TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize("weights", [False, True])
def test_templates_in_a_folder_of_their_own_are_downloaded(
    hub: HubStub, folder: Path, weights: bool
) -> None:
    others = {"other/tool_use.jinja": b"x", "additional_chat_templates/README.md": b"x"}
    hub.models[ID].commit(files_of(folder) | {TEMPLATE: b"tools"} | others)
    found = resolve(ID, Told(), "none", weights=weights).path
    assert (found / TEMPLATE).read_bytes() == b"tools"
    assert not any((found / name).exists() for name in others)


def test_a_cache_that_lacks_such_a_template_is_completed(hub: HubStub, folder: Path) -> None:
    commit = hub.models[ID].commit(files_of(folder) | {TEMPLATE: b"tools"})
    found = resolve(ID, Told(), "none").path
    (found / TEMPLATE).unlink()
    listing = hub_model._file(ID, commit)
    names = sorted(NEEDED)
    listing.write_text(json.dumps({"small": names, "weights": []}))
    assert (resolve(ID, Told(), "none").path / TEMPLATE).read_bytes() == b"tools"


def test_small_files_take_no_branch_from_a_complete_snapshot(hub: HubStub, folder: Path) -> None:
    first = resolve(ID, Told())
    hub.models[ID].commit(files_of(folder) | {"chat_template.jinja": b"new"})
    assert resolve(ID, Told(), weights=False).commit == main_of(hub)
    assert look(ID).path == first.path


def test_a_private_model_takes_the_token(
    hub: HubStub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[ID].private = True
    message = refused()
    assert "check the spelling" in message
    assert "HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    resolve(ID, Told())
    assert {one.token for one in hub.seen[-4:]} == {TOKEN}
    shutil.rmtree(home)
    monkeypatch.delenv("HF_TOKEN")
    home.mkdir()
    (home / "token").write_text(TOKEN)
    assert resolve(ID, Told()).commit, "what `hf auth login` has stored"


def test_a_bad_token_is_said(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refused()
    assert "refuses the token" in message
    assert "hf_wrong" not in message


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_names_its_page(
    hub: HubStub, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[ID].gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    message = refused()
    assert f"accept its terms on https://huggingface.co/{ID}" in message
    assert ("the account of your token" in message) == bool(token)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_an_unknown_id_is_said(hub: HubStub, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert "the hub has no model tests/tiny-lama" in refused("tests/tiny-lama")


def test_an_unknown_revision_is_said(hub: HubStub) -> None:
    message = refused(revision="v9")
    assert "has no revision 'v9'" in message
    assert f"https://huggingface.co/{ID}/tree/main" in message


def test_a_revision_is_for_ids(hub: HubStub, folder: Path) -> None:
    assert "is only for a Hugging Face id" in refused(str(folder), "main")
    assert "is only for a Hugging Face id" in refused("smollm2-135m-instruct", "main")


def test_an_architecture_is_refused_before_weights(hub: HubStub, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["MambaForAll"]}
    hub.models[ID].commit(files_of(folder) | {"config.json": json.dumps(config).encode()})
    message = refused()
    assert "MambaForAll" in message
    assert "LlamaForCausalLM" in message, "it lists those that are served"
    assert [one.path.rpartition("/")[2] for one in hub.downloads()] == ["config.json"]


def test_a_quantization_is_refused_before_weights(hub: HubStub, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    hub.models[ID].commit(files_of(folder) | {"config.json": json.dumps(config).encode()})
    assert "bitsandbytes" in refused()
    assert hub.downloads(".safetensors") == []
    # A router reads no weights. The check would import torch, which its image lacks.
    assert resolve(ID, Told(), weights=False).commit == main_of(hub)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ((".safetensors",), r"has no \*\.safetensors file \(only pytorch_model.bin\)"),
        (("tokenizer.json",), "has no tokenizer.json"),
        (("config.json",), "has no config.json, so it is not in the Transformers format"),
        (("model-2.safetensors",), "lacks shards that its index names: model-2.safetensors"),
    ],
)
def test_what_a_model_lacks_is_said_before_weights(
    hub: HubStub, folder: Path, lost: tuple[str, ...], message: str
) -> None:
    files = {name: data for name, data in files_of(folder).items() if not name.endswith(lost)}
    hub.models[ID].commit(files)
    with pytest.raises(ConfigError, match=message):
        resolve(ID, Told())
    assert hub.downloads(".safetensors") == []


def test_a_cut_download_asks_for_the_rest_only(
    hub: HubStub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.cut["model-1.safetensors"] = 40_000
    path = resolve(ID, Told()).path
    first, second = hub.downloads("model-1.safetensors")
    assert first.range == ""
    start = int(second.range.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= 40_000
    whole = (folder / "model-1.safetensors").read_bytes()
    assert (path / "model-1.safetensors").read_bytes() == whole


@pytest.mark.long
def test_a_stall_ends_with_what_was_kept(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.stalled["model-2.safetensors"] = 0
    message = refused()
    assert "ReadTimeout" in message
    assert "1 of 2 files" in message
    assert "the same command continues" in message
    assert len(hub.downloads("model-2.safetensors")) == 6, "it asks again five times"
    hub.released.set()
    hub.stalled.clear()
    hub.seen.clear()
    resolve(ID, Told())
    assert [one.path.rpartition("/")[2] for one in hub.downloads()] == ["model-2.safetensors"]


def test_silence_of_the_library_has_a_deadline(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "_SILENCE_S", 0.3)
    hub.stalled["model-1.safetensors"] = 0
    try:
        assert "no bytes for 0 s" in refused()
    finally:
        hub.released.set()


def test_a_download_can_be_cancelled(hub: HubStub) -> None:
    hub.stalled["model-1.safetensors"] = 0
    watch = DownloadWatch(every_s=0.1)
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        if f"downloading {ID}: " in line:
            watch.cancelled.set()
            hub.released.set()

    with pytest.raises(Cancelled):
        resolve(ID, progress, "none", "", watch)
    assert look(ID).cached is False


def test_a_small_disk_is_said_before_weights(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 20, 1 << 20, 60_000))
    message = refused()
    assert "60.0 kB free" in message
    assert "are missing. Free some space, or set HF_HOME" in message
    assert hub.downloads(".safetensors") == []


def test_a_small_disk_takes_what_it_has_already(
    hub: HubStub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(ID, Told())
    hub.models[ID].commit(files_of(folder) | {"chat_template.jinja": b"new"})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 20, 1 << 20, 1000))
    assert resolve(ID, Told()).commit == main_of(hub)


def test_a_full_disk_is_said(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "a file"
    cache.write_text("where the folder should be")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    message = refused()
    assert f"the cache {cache} cannot be written" in message
    assert "HF_HOME" in message


def test_an_error_of_the_disk_names_its_folder(
    hub: HubStub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> Usage:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "disk_usage", fails)
    message = refused()
    assert str(home / "hub") in message
    assert "set HF_HOME" in message
    assert "BATON_CACHE_DIR" not in message


def test_without_a_network_the_cached_one_is_taken(hub: HubStub) -> None:
    first = resolve(ID, Told())
    hub.close()
    huggingface_hub.close_session()
    told = Told()
    assert resolve(ID, told) == first
    assert len(told) == 1
    assert "cannot reach the hub" in told[0]
    assert first.commit in told[0]
    message = refused(revision="v2")
    assert f"`hf download {ID}` on another machine" in message


def test_a_silent_hub_costs_seconds(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(ID, Told())
    monkeypatch.setattr(hub_model, "_CACHED_ASK_S", 0.2)
    monkeypatch.setattr(hub_model, "ASK_S", 0.2)
    hub.answer_nothing = True
    told = Told()
    assert resolve(ID, told) == first
    assert "cannot reach the hub (no answer in time)" in told[0] or "ReadTimeout" in told[0]
    assert "cannot download" in refused(revision="v2")
    hub.released.set()


def test_what_is_no_hub_is_said(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = f"{hub.endpoint}/api/models/{{repo_id}}?{{revision}}{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    assert "HF_ENDPOINT" in refused()


def test_offline_asks_nothing(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(ID, Told())
    hub.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(ID, Told()) == first
    message = refused("tests/another")
    assert "HF_HUB_OFFLINE is set: unset it" in message
    assert hub.seen == []


def test_an_incomplete_snapshot_is_completed(hub: HubStub) -> None:
    first = resolve(ID, Told())
    (first.path / "model-2.safetensors").resolve().unlink()
    assert look(ID).cached is False
    hub.seen.clear()
    assert resolve(ID, Told()) == first
    assert [one.path.rpartition("/")[2] for one in hub.downloads()] == ["model-2.safetensors"]


def test_cached_models_are_listed(hub: HubStub, folder: Path) -> None:
    first = resolve(ID, Told())
    hub.models["tests/other"] = hub.models[ID]
    huggingface_hub.hf_hub_download("tests/other", "config.json")
    entries = [one for one in model_store.list_models() if one.source.startswith("hub, ")]
    found = [(one.name, one.path, one.source) for one in entries if one.cached]
    assert found == [(ID, first.path, f"hub, {first.commit}")]
    assert entries[-1].size == sum((folder / name).stat().st_size for name in NEEDED)
    found_here = look(ID)
    assert (found_here.cached, found_here.path) == (True, first.path)


def test_close_names_are_suggested(hub: HubStub) -> None:
    resolve(ID, Told())
    assert f"Did you mean '{ID}'?" in refused("Tiny-Lama")
    assert "Did you mean 'smollm2-135m-instruct'?" in refused("smollm2-135m-instuct")
    message = refused("mistral")
    assert "Did you mean" not in message
    assert "such as Qwen/Qwen3-0.6B" in message
    assert "hf download org/name file.gguf" in refused("org/name/file.gguf")


def test_a_path_wins(
    hub: HubStub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, ID)
    model = resolve(ID, Told())
    assert (model.name, model.path) == ("tiny-llama", tmp_path / ID)
    assert hub.seen == []


def test_processes_share_one_download(hub: HubStub, tmp_path: Path) -> None:
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
    }
    code = (
        "import sys; from deploy.models.model_store import resolve;"
        " print(resolve(sys.argv[1], print))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, ID], stdout=subprocess.PIPE, text=True, env=env
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert len(hub.downloads(".safetensors")) == 2


def test_ctrl_c_leaves_no_part(hub: HubStub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.slow["model-1.safetensors"] = 0.5  # 22 s in all

    def interrupt(line: str) -> None:
        if f"downloading {ID}: " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(ID, interrupt, "none", "", DownloadWatch(every_s=0.1))
    assert list(home.rglob("*.incomplete")) == []
    assert [one.name for one in threading.enumerate() if one.name == "hub download"] == []


def test_ctrl_c_leaves_no_part_of_a_stalled_file(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr(hub_download, "_GRACE_S", 0.1)
    hub.stalled["model-1.safetensors"] = 4096
    others = home / "hub" / "models--tests--tiny-llama" / "blobs"
    others.mkdir(parents=True)
    fresh, stale = others / "a.1.incomplete", others / "b.2.incomplete"
    for file in (fresh, stale):
        file.write_text("another program's")
    an_hour_ago = time.time() - 3600
    os.utime(stale, (an_hour_ago, an_hour_ago))

    def interrupt(line: str) -> None:
        if f"downloading {ID}: " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(ID, interrupt, "none", "", DownloadWatch(every_s=0.1))
    parts = list(home.rglob("*.incomplete"))
    hub.released.set()
    for thread in threading.enumerate():
        if thread.name == "hub download":
            thread.join(15)
    assert parts == [fresh], "another program may still write that one"


def test_no_error_and_no_log_shows_a_signed_address(
    hub: HubStub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.signed.add("model-1.safetensors")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        resolve(ID, Told())
    assert SIGNATURE not in caplog.text
    text = "".join(traceback.format_exception(caught.value))
    assert "it answers 404" in text
    assert SIGNATURE not in text
