"""Reading safetensors files: mapped, sharded, damaged; and the fingerprint of a folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint import fingerprint as fingerprint_module
from engine.checkpoint.fingerprint import Fingerprint
from engine.model.weights import load_weights
from tests.support.engine.weights import name_of
from tests.support.models import make_tiny_model

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def mapped_file(address: int) -> str:
    """The file behind an address of this process; empty where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_rest = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return line.partition("/")[1] + line.partition("/")[2]
    return ""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{n}": torch.randn(64, 100 + n, generator=generator) for n in range(6)}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> list[Path]:
    """Two tensors a file, and the index that names the files."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for n in range(3):
        file = f"model-{n + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[2 * n : 2 * n + 2]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return sorted(folder.glob("*.safetensors"))


def load_plain(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights of a folder that has no quantized ones."""
    found = load_weights(folder, CPU, dtype)
    plain = {name: w for name, w in found.items() if isinstance(w, torch.Tensor)}
    assert plain.keys() == found.keys()
    return plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_the_wanted_type_stay_in_the_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    saved = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(saved, tmp_path / WEIGHTS)
    found = load_plain(tmp_path, dtype)
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name])
        assert mapped_file(tensor.data_ptr()) == str(tmp_path / WEIGHTS)
    assert len({tensor.data_ptr() for tensor in found.values()}) == len(found)


def test_weights_of_another_type_are_converted(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    found = load_plain(tmp_path, torch.bfloat16)
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[name].bfloat16())
        assert mapped_file(tensor.data_ptr()) != str(tmp_path / WEIGHTS)


def test_all_shards_are_read(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, tensors)
    found = load_plain(tmp_path, torch.float32)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_shards_without_an_index_are_read(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, tensors)
    (tmp_path / INDEX).unlink()
    assert load_plain(tmp_path, torch.float32).keys() == tensors.keys()


def test_the_index_says_which_files_belong_to_the_model(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    write_shards(tmp_path, tensors)
    save_file({"t0": torch.zeros(64, 100)}, tmp_path / "zz_adapter.safetensors")
    found = load_plain(tmp_path, torch.float32)
    assert torch.equal(found["t0"], tensors["t0"])


def test_a_missing_shard_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = write_shards(tmp_path, tensors)
    shards[1].unlink()
    with pytest.raises(ConfigError, match=shards[1].name):
        load_weights(tmp_path, CPU, torch.float32)
    with pytest.raises(ConfigError, match=shards[1].name):
        name_of(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../model-00001-of-00003.safetensors"}}',
    ],
)
def test_a_damaged_index_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], text: str
) -> None:
    write_shards(tmp_path, tensors)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=INDEX):
        load_weights(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize("name", ["pytorch_model.bin", None])
def test_a_folder_without_safetensors(tmp_path: Path, name: str | None) -> None:
    if name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match="safetensors"):
        load_weights(tmp_path, CPU, torch.float32)
    with pytest.raises(ConfigError, match="safetensors"):
        name_of(tmp_path)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut in the header": lambda data: data[:50],
    "cut in the weights": lambda data: data[:-1000],
    "too long": lambda data: data + b"x",
    "another format": lambda data: b"PK\x03\x04" * (len(data) // 4),
    "header's length": lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
    "header's text": lambda data: data.replace(b'"dtype"', b'"dtypo"', 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], damage: str
) -> None:
    path = tmp_path / WEIGHTS
    save_file(tensors, path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ConfigError, match=WEIGHTS):
        load_weights(tmp_path, CPU, torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_copy_has_the_same_fingerprint(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    known = name_of(model)
    assert name_of(copy) == known
    assert len(known) == 32
    assert int(known, 16) >= 0


def test_files_that_decide_no_answer_do_not_count(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("hello")
    assert name_of(copy) == name_of(model)


def test_the_type_changes_the_fingerprint(model: Path) -> None:
    assert name_of(model) != name_of(model, "bfloat16")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_config_and_tokenizer_change_the_fingerprint(
    tmp_path: Path, model: Path, file: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    text = (copy / file).read_text()
    changed = text.replace("1", "2", 1)
    assert changed != text
    (copy / file).write_text(changed)
    assert name_of(copy) != name_of(model)
    (copy / file).unlink()
    assert name_of(copy) != name_of(model)


def test_any_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    """Files of one size, larger than what is read of them: each tensor has its say."""
    generator = torch.Generator().manual_seed(0)
    # 40 tensors of 64 KiB.
    weights = {f"w{n:02}": torch.randn(128, 128, generator=generator) for n in range(40)}
    save_file(weights, tmp_path / WEIGHTS)
    seen = {name_of(tmp_path)}
    for name, tensor in weights.items():
        save_file(weights | {name: tensor * 1.01}, tmp_path / WEIGHTS)
        seen.add(name_of(tmp_path))
    assert len(seen) == 1 + len(weights)


def large(path: Path, place: int | None = None) -> Path:
    """A sparse file of two segments, with a byte that is not 0 at a place."""
    with path.open("wb") as file:
        file.truncate(fingerprint_module._SEGMENT + 100)
        if place is not None:
            file.seek(place)
            file.write(b"x")
    return path


def test_every_byte_of_large_files_counts(tmp_path: Path) -> None:
    """The last of the first segment, and the last of all, too."""
    names = set()
    last = fingerprint_module._SEGMENT - 1
    for place in (None, last, last + 1, last + 100):
        large(tmp_path / WEIGHTS, place)
        names.add(name_of(tmp_path))
    assert len(names) == 4


class Kept:
    """Hashes of one file, in a cache of their own; the clock is ``later`` seconds ahead."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "model" / WEIGHTS
        self.file.parent.mkdir()
        self.read = 0
        self._cache = folder / "cache"
        segment = Fingerprint._segment

        def counted(found: Fingerprint, file: int, start: int) -> bytes:
            self.read += 1
            return segment(found, file, start)

        monkeypatch.setattr(Fingerprint, "_segment", counted)

    def name(self, later: float = 60.0) -> str:
        def clock() -> int:
            return time.time_ns() + int(later * 1e9)

        with Fingerprint([self.file], "bfloat16", "auto", self._cache, clock) as found:
            return found.result()


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, monkeypatch)
    kept.file.write_bytes(b"weights")
    first = kept.name()
    assert kept.read == 1
    assert kept.name() == first
    assert kept.read == 1


def test_an_edit_in_place_that_hides_its_time_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the inode's change cannot be set."""
    kept = Kept(tmp_path, monkeypatch)
    kept.file.write_bytes(b"weights")
    first, before = kept.name(), kept.file.stat()
    with kept.file.open("r+b") as file:
        file.write(b"W")
    os.utime(kept.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = kept.file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert kept.name() != first


def test_a_file_that_has_just_changed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path, monkeypatch)
    kept.file.write_bytes(b"weights")
    assert kept.name(later=0.0) == kept.name(later=0.0)
    assert kept.read == 2


@pytest.mark.parametrize("text", ["", "[]", '{"1": 2}'])
def test_a_damaged_cache_costs_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    kept = Kept(tmp_path, monkeypatch)
    kept.file.write_bytes(b"weights")
    first = kept.name()
    (tmp_path / "cache" / "fingerprints.json").write_text(text)
    assert kept.name() == first
    assert kept.read == 2


def test_a_start_that_fails_ends_the_hashing(tmp_path: Path) -> None:
    hashed = Fingerprint([large(tmp_path / WEIGHTS)], "bfloat16", "auto", tmp_path / "cache")
    hashed.__exit__()
    with pytest.raises(ConfigError, match="the start ended"), hashed:
        hashed.result()


def test_shards_have_a_fingerprint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = write_shards(tmp_path, tensors)
    known = name_of(tmp_path)
    changed = load_file(shards[2])
    name = next(iter(changed))
    save_file(changed | {name: changed[name] + 1}, shards[2])
    assert name_of(tmp_path) != known


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    (tmp_path / name).write_text("{}")

    def read_bytes(path: Path) -> bytes:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with (
        Fingerprint([tmp_path / WEIGHTS], "bfloat16", "auto", tmp_path / "cache") as found,
        pytest.raises(ConfigError, match=f"{name} cannot be read: Permission denied"),
    ):
        found.result()
