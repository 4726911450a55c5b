"""A model's folder, and what is read from it."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers

from baton.errors import ConfigError, InvalidRequest
from baton.hashing import text_hash
from router.text import tokenizer_files
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import PIECE_CHARACTERS, Tokenizer
from router.text.tokenizer_files import MAX_TOKENIZER_BYTES
from tests.support.router.front_fakes import EOS, TEMPLATE, tiny_backend, tiny_tokenizer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the tokenizer without its sandbox, which the test is not about."""

    def load(file: Path, added: object) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(file))

    monkeypatch.setattr(tokenizer_files, "load_backend", load)


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


def test_a_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    path = folder(tmp_path, {"chat_template": [{"name": "tool_use", "template": "no"}]})
    (path / "chat_template.jinja").write_text("plain")
    assert Tokenizer.load(path).render_chat(HELLO, 1000, []).result() == "plain"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (path / "additional_chat_templates" / "rag.jinja").write_text("{% not for chats")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_chat(HELLO, 1000).result() == "plain"
    assert tokenizer.render_chat(HELLO, 1000, []).result() == "tools"


@pytest.mark.parametrize("name", ["tool_use", "default"])
def test_a_malformed_template_of_a_folder_is_named(name: str, tmp_path: Path, quick: None) -> None:
    path = folder(tmp_path, {"chat_template": TEMPLATE})
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / f"{name}.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=rf"{name}\.jinja"):
        Tokenizer.load(path)


def test_templates_by_name_in_one_object(tmp_path: Path) -> None:
    path = folder(tmp_path, {"chat_template": {"default": "plain", "tool_use": "tools"}})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_chat(HELLO, 1000).result() == "plain"
    assert tokenizer.render_chat(HELLO, 1000, []).result() == "tools"


def test_the_template_of_a_processor_goes_last(tmp_path: Path) -> None:
    path = folder(tmp_path, {}, chat_template={"chat_template": "processor"})
    assert Tokenizer.load(path).render_chat(HELLO, 1000).result() == "processor"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    assert Tokenizer.load(path).render_chat(HELLO, 1000).result() == "own"


def test_every_file_about_the_tokens_counts_for_the_hash(tmp_path: Path) -> None:
    """Routers refuse workers with another hash."""
    path = folder(tmp_path, {})
    (path / "additional_chat_templates").mkdir()
    hashes = {text_hash(path)}
    for name in (
        *("special_tokens_map.json", "added_tokens.json", "chat_template.json"),
        *("additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"),
    ):
        (path / name).write_text("{}")
        hashes.add(text_hash(path))
    assert len(hashes) == 6


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


def vocabulary(ids: dict[str, Any], **fields: Any) -> str:
    """A tokenizer.json with these tokens."""
    model = {"type": "BPE", "vocab": ids, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **fields})


HOSTILE_TOKENIZERS = {
    "a hole": (vocabulary({"a": 0, "b": 4_294_967_294}), r"model\.vocab has the id 4294967294"),
    "a smaller hole": (vocabulary({"a": 0, "b": 10**8}), r"model\.vocab has the id 100000000"),
    "a hole before an added token": (
        vocabulary({"a": 0}, added_tokens=[{"id": 10**9, "content": "b"}]),
        "added_tokens has the id 1000000000",
    ),
    "an id that is no number": (vocabulary({"a": "x"}), r"model\.vocab has the id 'x'"),
    "an id below 0": (vocabulary({"a": -1}), r"model\.vocab has the id -1"),
    "no vocabulary": (vocabulary(cast(Any, 5)), r"model\.vocab must be"),
    "no model": ("{}", "model must be an object"),
    "added tokens that are none": (vocabulary({}, added_tokens=[5]), "added_tokens must be"),
    "deep": ("[" * 100_000, "recursion"),
    "not Unicode": ("\udcff", "utf-8"),
    "a normalizer that multiplies": (
        vocabulary(
            {"a": 0},
            normalizer={
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}
                ]
                * 6,
            },
        ),
        "to load it needs more than",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_with_the_field_and_this_process_lives(
    name: str, tmp_path: Path
) -> None:
    text, why = HOSTILE_TOKENIZERS[name]
    path = folder(tmp_path, {}, config={}, generation_config={})
    (path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=why) as caught:
        Tokenizer.load(path)
    assert str(path / "tokenizer.json") in caught.value.message
    # In KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 32 << 10


def test_a_tokenizer_file_is_bounded(tmp_path: Path) -> None:
    path = folder(tmp_path, {})
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ConfigError, match="the limit is"):
        Tokenizer.load(path)


def test_a_vocabulary_may_leave_some_ids_out(tmp_path: Path) -> None:
    path = folder(tmp_path, {})
    (path / "tokenizer.json").write_text(vocabulary({"a": 0, "b": 200_000}))
    assert Tokenizer.load(path).encode("b") == (200_000,)


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (file, {"eos_token_id": value}, "eos_token_id")
        for file in ("config", "generation_config")
        for value in (["x"], ["x", 1], "x", [[1]], [None], True, [-1], 1.5, {"a": 1}, 2**40)
    ),
    *(("config", {"vocab_size": value}, "vocab_size") for value in (0, -1, "x", [1], 2**40, 1.5)),
    *(
        ("tokenizer_config", {"chat_template": value}, "chat_template")
        for value in (5, True, {"a": 5}, [5], ["x"])
    ),
    ("chat_template", {"chat_template": 5}, "chat_template"),
    ("tokenizer_config", {"added_tokens_decoder": [5]}, "added_tokens_decoder"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": "a"}}, "added_tokens_decoder"),
    ("tokenizer_config", {"added_tokens_decoder": {"5": 5}}, "added_tokens_decoder.5"),
    ("tokenizer_config", {"added_tokens_decoder": {"5": {"content": "a", "lstrip": 5}}}, "lstrip"),
    ("tokenizer_config", {"extra_special_tokens": {"image_token": 5}}, "image_token"),
    ("tokenizer_config", {"split_special_tokens": 5}, "split_special_tokens"),
    *(
        ("tokenizer_config", {f"{name}_special_tokens": 5}, name)
        for name in ("extra", "additional")
    ),
    ("special_tokens_map", {"bos_token": 5}, "bos_token"),
    ("special_tokens_map", {"additional_special_tokens": [5]}, "additional_special_tokens"),
    *(("added_tokens", {"a": value}, "the id of 'a'") for value in ("x", -1, True, 2**40)),
    ("tokenizer_config", {"chat_template": [{"name": 5, "template": "x"}]}, "name"),
    ("tokenizer_config", {"chat_template": [{"name": "default", "template": 5}]}, "template"),
    ("tokenizer_config", {"chat_template": "{% for %}"}, "chat_template"),
    *(
        ("tokenizer_config", {name: value}, name)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        for value in (5, ["x"], {"content": 5}, {})
    ),
]


@pytest.mark.parametrize(("name", "fields", "field"), MALFORMED)
def test_a_malformed_field_is_named_with_its_file(
    name: str, fields: dict[str, Any], field: str, tmp_path: Path, quick: None
) -> None:
    path = folder(tmp_path, {})
    (path / f"{name}.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(path)
    assert field in caught.value.message
    assert str(path / f"{name}.json") in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        *("config", "generation_config", "tokenizer_config", "special_tokens_map"),
        *("added_tokens", "chat_template"),
    ],
)
@pytest.mark.parametrize("text", ["", "[]", "5", "{", "[" * 100_000, "\udcff", "9" * 5000])
def test_a_malformed_file_is_named(name: str, text: str, tmp_path: Path, quick: None) -> None:
    path = folder(tmp_path, {})
    (path / f"{name}.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=rf"{name}\.json"):
        Tokenizer.load(path)


def test_a_malformed_template_file_is_named(tmp_path: Path, quick: None) -> None:
    path = folder(tmp_path, {})
    for text in (b"\xff", b"{% for %}"):
        (path / "chat_template.jinja").write_bytes(text)
        with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
            Tokenizer.load(path)


def test_a_null_field_counts_as_absent(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        {"eos_token": None, "bos_token": None, "chat_template": None, "add_bos_token": True},
        config={"eos_token_id": None, "vocab_size": None},
        generation_config={"eos_token_id": None},
    )
    tokenizer = Tokenizer.load(path)
    assert not tokenizer.eos_ids
    assert not tokenizer.has_chat_template


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
