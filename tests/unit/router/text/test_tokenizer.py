"""A model's folder, and what is read from it."""

from __future__ import annotations

import json
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
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Tokenizer.load(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
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
