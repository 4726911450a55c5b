"""A model's folder, and what is read from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.errors import ConfigError, InvalidRequest
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import PIECE_CHARACTERS, Tokenizer
from tests.support.router.front_fakes import EOS, TEMPLATE, tiny_backend, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def folder(path: Path, settings: dict[str, Any], **files: Any) -> Path:
    tiny_backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def add_token(path: Path, text: str, number: int) -> None:
    """Add a token to the tokenizer.json of a folder, under any id."""
    file = path / "tokenizer.json"
    layout = json.loads(file.read_text())
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    layout["added_tokens"].append({"id": number, "content": text, "special": True, **rules})
    file.write_text(json.dumps(layout))


def test_ends_of_sequence_come_from_every_file(tmp_path: Path) -> None:
    eos = tiny_backend().token_to_id(EOS)
    path = folder(
        tmp_path,
        {"eos_token": {"content": EOS}},
        config={"eos_token_id": 7, "vocab_size": 1000},
        generation_config={"eos_token_id": [8, 9]},
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_ids == {7, 8, 9, eos}
    assert tokenizer.vocab_size == 1000
    assert tokenizer.detokenizer().step(999) == ""


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_with_a_token_beyond_the_embeddings_is_refused(tmp_path: Path, nested: bool) -> None:
    """Fine-tunes add tokens and do not resize the embeddings."""
    path = folder(tmp_path, {"eos_token": EOS})
    rows = tiny_backend().get_vocab_size(with_added_tokens=True)
    add_token(path, "<|beyond|>", rows)
    config = {"vocab_size": rows, "eos_token_id": [1, rows]}
    config = {"text_config": config, "eos_token_id": [rows]} if nested else config
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.vocab_size == rows
    assert max(tokenizer.eos_ids) < rows, "the model never draws this end"
    tokenizer.check_embedded(tokenizer.encode("a b"), "prompt")
    tokenizer.check_embedded((), "prompt")
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.check_embedded(tokenizer.encode("a <|beyond|> b"), "prompt")
    assert caught.value.param == "prompt"
    assert caught.value.message == (
        f'prompt contains the text of the token "<|beyond|>" (id {rows}), for which the model'
        f" has no embedding: its ids end at {rows - 1}; remove that text"
    )
    assert tokenizer.marker_ids("<|beyond|>") is None
    assert tokenizer.marker_ids(EOS) == (1,)


def test_a_tokenizer_within_the_embeddings_is_never_searched(tmp_path: Path) -> None:
    class Unread(Sequence[int]):
        def __len__(self) -> int:
            raise AssertionError("it was read")

        def __getitem__(self, place: Any) -> Any:
            raise AssertionError("it was read")

    path = folder(tmp_path, {}, config={"vocab_size": 1000})
    Tokenizer.load(path).check_embedded(Unread(), "prompt")


def test_the_largest_id_counts_and_not_the_number_of_tokens() -> None:
    words = {"near": 0, "far": 900}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="near"))
    assert Tokenizer(backend).vocab_size == 901
    with pytest.raises(InvalidRequest, match="its ids end at 899"):
        Tokenizer(backend, vocab_size=900).check_embedded((0, 900), "prompt")


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
)
def test_templates_in_the_settings(tmp_path: Path, template: Any) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, {"chat_template": template}))
    assert tokenizer.render_chat(HELLO, 1000).result().startswith("<|im_start|>user\nHello")


def test_a_template_file_goes_first(tmp_path: Path) -> None:
    path = folder(tmp_path, {"chat_template": "no", "bos_token": "<s>"})
    (path / "chat_template.jinja").write_text("{{ bos_token }}yes")
    assert Tokenizer.load(path).render_chat(HELLO, 1000).result() == "<s>yes"


def test_a_bad_model_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    path = folder(tmp_path, {})
    (path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        Tokenizer.load(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must contain a JSON object"):
        Tokenizer.load(path)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ missing }}|", "|"),
    ],
)
def test_what_templates_may_use(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(HELLO, 1000).result() == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].clear() }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(HELLO, 1000).result()


def test_special_tokens_in_text_are_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(f"a{EOS}", add_special_tokens=False)
    assert ids[-1] in tokenizer.eos_ids
    assert tokenizer.decode(ids) == "a"


def test_fewest_tokens_is_a_bound() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("", "a", "the capital of France is Paris " * 50, "😀" * 30):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def words(count: int) -> str:
    return " ".join(f"word{number}" for number in range(count))


def test_the_end_of_a_long_text() -> None:
    tokenizer = tiny_tokenizer()
    text = words(100_000)
    assert len(text) > 2 * PIECE_CHARACTERS
    assert tokenizer.encode(text, last=1000) == tokenizer.encode(text)[-1000:]


def test_a_text_of_too_many_tokens_is_not_tokenized_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    encoded = Tokenizer._encoded

    def watched(self: Tokenizer, text: str, *, special: bool) -> tokenizers.Encoding:
        sizes.append(len(text))
        return encoded(self, text, special=special)

    def check(count: int) -> None:
        if count > 1000:
            raise ValueError("too many")

    monkeypatch.setattr(Tokenizer, "_encoded", watched)
    with pytest.raises(ValueError, match="too many"):
        tiny_tokenizer().encode(words(400_000), check=check)
    assert sizes == [PIECE_CHARACTERS]


def test_a_long_text_within_the_bound() -> None:
    tokenizer = tiny_tokenizer()
    text = words(40_000)
    counts: list[int] = []
    ids = tokenizer.encode(text, check=counts.append)
    # What is checked on the way is never above what is checked at last.
    assert max(counts) == counts[-1] == len(ids)
