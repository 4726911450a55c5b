"""Special and added tokens in the files next to a tokenizer.json.

tests/unit/router/text/test_against_transformers.py compares whole folders with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.errors import ConfigError
from router.text.tokenizer import Tokenizer

WORDS = {"hi": 0, "user": 1, ":": 2, "<s>": 3, "</s>": 4, "[U]": 5}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }} {{ eos_token }}"
    "{% endfor %}"
)
HELLO = [{"role": "user", "content": "hi"}]
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def loaded(folder: Path, **files: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[U]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": {"vocab_size": 16}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def rendered(tokenizer: Tokenizer) -> str:
    return tokenizer.render_chat(HELLO, 1000, generation_prompt=False).result()


def test_an_older_folder_names_its_special_tokens_in_a_map(tmp_path: Path) -> None:
    tokenizer = loaded(
        tmp_path,
        tokenizer_config={"chat_template": TEMPLATE},
        special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>", **FLAGS}},
    )
    assert rendered(tokenizer) == "<s>user : hi </s>"
    assert tokenizer.eos_ids == {4}


def test_the_map_goes_before_the_settings_if_these_do_not_list_the_added_tokens(
    tmp_path: Path,
) -> None:
    settings = {"chat_template": TEMPLATE, "bos_token": "hi", "eos_token": "user"}
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded(tmp_path, tokenizer_config=settings, special_tokens_map=names).eos_ids == {4}
    settings["added_tokens_decoder"] = {}  # type: ignore[assignment]
    assert loaded(tmp_path, tokenizer_config=settings, special_tokens_map=names).eos_ids == {1}


def test_a_listed_token_is_added_and_is_special_if_it_has_a_name(tmp_path: Path) -> None:
    listed = {"9": {"content": "<tool>", **FLAGS}, "8": {"content": "<end>", **FLAGS}}
    tokenizer = loaded(
        tmp_path, tokenizer_config={"added_tokens_decoder": listed, "eos_token": "<end>"}
    )
    # As in transformers, the ids in the list decide the order alone.
    assert tokenizer.encode("hi<end>hi<tool>") == (0, 6, 0, 7)
    assert tokenizer.eos_ids == {6}
    assert tokenizer.decode((0, 6, 7)) == "hi <tool>"


def test_tokens_of_older_folders_are_added(tmp_path: Path) -> None:
    tokenizer = loaded(
        tmp_path,
        added_tokens={"<tool>": 7, "<pad>": 6},
        special_tokens_map={"pad_token": "<pad>", "additional_special_tokens": ["<more>"]},
    )
    assert tokenizer.encode("hi<pad><tool><more>") == (0, 6, 7, 8)
    assert tokenizer.decode((0, 6, 7, 8)) == "hi <tool>"


@pytest.mark.parametrize("field", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_without_a_name_are_added(field: str, tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, tokenizer_config={field: ["<more>", "</s>"]})
    assert tokenizer.encode("hi<more></s>") == (0, 6, 4)
    assert tokenizer.decode((0, 6)) == "hi"


def test_a_model_names_further_special_tokens_for_its_template(tmp_path: Path) -> None:
    tokenizer = loaded(
        tmp_path,
        tokenizer_config={
            "chat_template": "{{ image_token }}{{ audio }}{{ add_bos_token }}",
            "image_token": "<image>",
            "extra_special_tokens": {"audio": "<audio>"},
            "add_bos_token": True,
        },
    )
    assert rendered(tokenizer) == "<image><audio>"
    assert tokenizer.encode("<image><audio>") == (6, 7)


def test_texts_of_special_tokens_are_split_if_the_settings_split_them(tmp_path: Path) -> None:
    assert loaded(tmp_path, tokenizer_config={"split_special_tokens": True}).encode("hi </s>") != (
        0,
        4,
    )


@pytest.mark.parametrize(
    ("settings", "config", "ends"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, {}, {4}),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}, set()),
        ({}, {"tokenizer_class": "LlamaTokenizer"}, {4}),
        ({"tokenizer_class": "LlamaTokenizer", "eos_token": None}, {}, set()),
        ({}, {"model_type": "llama"}, set()),
    ],
)
def test_a_class_of_tokenizers_has_default_tokens(
    settings: dict[str, Any], config: dict[str, Any], ends: set[int], tmp_path: Path
) -> None:
    tokenizer = loaded(tmp_path, tokenizer_config=settings, config={"vocab_size": 16, **config})
    assert tokenizer.eos_ids == ends


def test_too_many_added_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 65536 added tokens"):
        loaded(tmp_path, added_tokens={f"<{number}>": number for number in range(1 << 17)})
