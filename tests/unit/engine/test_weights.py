"""Reading safetensors files: mapped, sharded, damaged; and the fingerprint of a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.weights import fingerprint, load_weights, written_at
from tests.models import make_tiny_model

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
    """All weights of a folder that has no quantised ones."""
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


def test_an_edit_in_place_is_noticed(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Also where it misses the parts of a tensor that a fingerprint reads."""
    save_file(tensors, tmp_path / WEIGHTS)
    before = written_at(tmp_path)
    assert written_at(tmp_path) == before
    os.utime(tmp_path / WEIGHTS, ns=(1, 1))
    assert written_at(tmp_path) != before


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
        fingerprint(tmp_path, "float32")


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
        fingerprint(tmp_path, "float32")


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
    known = fingerprint(model, "float32")
    assert fingerprint(copy, "float32") == known
    assert len(known) == 32
    assert int(known, 16) >= 0


def test_files_that_decide_no_answer_do_not_count(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("hello")
    assert fingerprint(copy, "float32") == fingerprint(model, "float32")


def test_the_type_changes_the_fingerprint(model: Path) -> None:
    assert fingerprint(model, "float32") != fingerprint(model, "bfloat16")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_config_and_tokenizer_change_the_fingerprint(
    tmp_path: Path, model: Path, file: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    text = (copy / file).read_text()
    changed = text.replace("1", "2", 1)
    assert changed != text
    (copy / file).write_text(changed)
    assert fingerprint(copy, "float32") != fingerprint(model, "float32")
    (copy / file).unlink()
    assert fingerprint(copy, "float32") != fingerprint(model, "float32")


def test_any_tensor_changes_the_fingerprint(tmp_path: Path) -> None:
    """Files of one size, larger than what is read of them: each tensor has its say."""
    generator = torch.Generator().manual_seed(0)
    # 40 tensors of 64 KiB.
    weights = {f"w{n:02}": torch.randn(128, 128, generator=generator) for n in range(40)}
    save_file(weights, tmp_path / WEIGHTS)
    seen = {fingerprint(tmp_path, "float32")}
    for name, tensor in weights.items():
        save_file(weights | {name: tensor * 1.01}, tmp_path / WEIGHTS)
        seen.add(fingerprint(tmp_path, "float32"))
    assert len(seen) == 1 + len(weights)


def test_a_fingerprint_reads_little(model: Path, tmp_path: Path) -> None:
    """A sparse file of 8 GiB takes no longer than one that can be read whole."""
    copy = shutil.copytree(model, tmp_path / "copy")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 31], "data_offsets": [0, 1 << 33]}})
    with (copy / WEIGHTS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 33))
    assert fingerprint(copy, "float32") != fingerprint(model, "float32")


def test_a_damaged_file_has_no_fingerprint(tmp_path: Path) -> None:
    for data in (b"", b"short", bytes([200, 0, 0, 0, 0, 0, 0, 0, 1]), b"\2" + bytes(7) + b"[]"):
        (tmp_path / WEIGHTS).write_bytes(data)
        with pytest.raises(ConfigError, match=WEIGHTS):
            fingerprint(tmp_path, "float32")


def test_shards_have_a_fingerprint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shards = write_shards(tmp_path, tensors)
    known = fingerprint(tmp_path, "float32")
    changed = load_file(shards[2])
    name = next(iter(changed))
    save_file(changed | {name: changed[name] + 1}, shards[2])
    assert fingerprint(tmp_path, "float32") != known
