from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from baton.errors import ConfigError
from deploy.models.gguf_tokenizer import (
    TokenizerMetadata,
    build_tokenizer,
    merges_from_scores,
    tokenizer_config,
)
from tests.support.deploy.tiny_gguf import SPECIALS, byte_level_model, tokenizer_metadata

TEXT = "the baton's passed 2024 times\n\n  it's  WE'LL — naïve 日本語 🙂🏽 ½ +=<>"


def build(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    keys = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return build_tokenizer(TokenizerMetadata.model_validate(tokenizer_metadata(pre) | keys))


def reference(pre: pre_tokenizers.PreTokenizer, **options: Any) -> Tokenizer:
    model = byte_level_model()
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **options))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])
REFERENCES = {
    "gpt-2": reference(BYTE_LEVEL),
    "smollm": reference(DIGITS),
    "llama-bpe": reference(split(LLAMA3), ignore_merges=True),
    "qwen2": reference(split(LLAMA3.replace("{1,3}", ""))),
}
REFERENCES["qwen2"].normalizer = normalizers.NFC()
BUILT = {pre: build(pre) for pre in REFERENCES}


@pytest.mark.parametrize("pre", REFERENCES)
@given(text=st.text() | st.text(alphabet="the bato 0123'sLW\n-+<|turn|>é"))
def test_cuts_text_as_the_named_tokenizer(pre: str, text: str) -> None:
    assert BUILT[pre].encode(text).ids == REFERENCES[pre].encode(text).ids


@pytest.mark.parametrize("pre", [*REFERENCES, "default", "starcoder", "smaug-bpe", "tekken"])
def test_text_survives(pre: str) -> None:
    tokenizer = build(pre, add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", [" ", "1", "2", "3", "4"]),
        ("gpt-2", [" 1234"]),
        ("llama3", [" ", "123", "4"]),
        ("qwen2", [" ", "1", "2", "3", "4"]),
        ("tekken", [" ", "1", "2", "3", "4"]),
        ("default", [" ", "123", "4"]),
    ],
)
def test_digits(pre: str, pieces: list[str]) -> None:
    pre_tokenizer = build(pre).pre_tokenizer
    assert pre_tokenizer is not None
    found = [piece.replace("Ġ", " ") for piece, _ in pre_tokenizer.pre_tokenize_str(" 1234")]
    assert found == pieces


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'superbpe' is not supported; these are: .*smollm"):
        build("superbpe")


def test_special_tokens_are_whole_and_hidden() -> None:
    tokenizer = build("smollm")
    ids = tokenizer.encode("<s>the<|turn|>").ids
    assert (ids[0], ids[-1]) == (1, 3)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the<|turn|>"


def test_user_defined_tokens_are_whole_and_shown() -> None:
    metadata = tokenizer_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<think>"]
    types = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = build(tokens=tokens, token_type=types)
    ids = tokenizer.encode("a<think>b").ids
    assert len(tokens) - 1 in ids
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.get_vocab_size() == len(tokens)


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_add_bos(pre: str, flag: bool | None, added: bool) -> None:
    tokenizer = build(pre, add_bos_token=flag)
    assert (tokenizer.encode("the").ids[0] == 1) is added
    assert 1 not in tokenizer.encode("the", add_special_tokens=False).ids
    metadata = tokenizer_metadata(pre) | {"tokenizer.ggml.add_bos_token": flag}
    config = tokenizer_config(TokenizerMetadata.model_validate(metadata), 128)
    assert config["add_bos_token"] is added
    assert config["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": ["Ġ zzz"]}, "'Ġ zzz' does not join two tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "same token twice"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"eos_token_id": 5000}, "the eos token's id 5000"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "t5"}, "'t5' is not supported; gpt2 and llama are"),
    ],
)
def test_faulty_metadata_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


# SentencePiece

PIECES = ["▁", "t", "h", "e", "a", "b", "o", "n", "▁t", "he", "▁the", "to", "on", "ton", "ba", "th"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
SPM_TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SPM_SCORES = [0.0] * 259 + [-100.0] * 8 + [-3.0, -1.0, -5.0, -4.0, -2.0, -6.0, -7.0, -0.5]


def sentencepiece(**changes: Any) -> Tokenizer:
    metadata = {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "scores": SPM_SCORES,
        "token_type": SPM_TYPES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    keys = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return build_tokenizer(TokenizerMetadata.model_validate(keys))


SPM = sentencepiece()


def joined(text: str, scores: dict[str, float]) -> Sequence[str]:
    """SentencePiece's own rule: join the neighbours whose union has the best score."""
    pieces = list(text)
    while True:
        unions = [left + right for left, right in pairwise(pieces)]
        known = [place for place, union in enumerate(unions) if union in scores]
        if not known:
            return pieces
        best = max(known, key=lambda place: scores[unions[place]])
        pieces[best : best + 2] = [unions[best]]


@given(st.text(alphabet="theabon ", min_size=1))
def test_sentencepiece_joins_by_score(text: str) -> None:
    scores = dict(zip(PIECES, SPM_SCORES[259:], strict=True))
    expected = joined("▁" + text.replace(" ", "▁"), scores)
    assert SPM.encode(text).tokens == ["<s>", *expected]


@given(st.text(min_size=1))
def test_sentencepiece_falls_back_to_bytes(text: str) -> None:
    assume(not any(token in text for token in ("▁", *SPM_TOKENS[:3])))
    assert SPM.decode(SPM.encode(text).ids) == text


def test_sentencepiece_without_a_space_before_the_text() -> None:
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("the").tokens == ["th", "e"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_merges_leave_out_what_is_no_text() -> None:
    tokens, types = ["a", "b", "ab", "<s>", "ba"], [1, 1, 1, 3, 4]
    assert merges_from_scores(tokens, [0.0] * 5, types) == [("a", "b")]
