"""Incremental text equals the tokenizer's own decoding of the whole."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from router.text.detokenizer import REPLACEMENT, Detokenizer
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import tiny_backend, tiny_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def run(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.step(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, tiny_backend().get_vocab_size() + 3), max_size=40))
def test_any_bytes_decode_as_the_whole_does(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(run(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@given(TEXTS)
def test_whole_characters_only(text: str) -> None:
    tokenizer = tiny_tokenizer()
    pieces = run(tokenizer.detokenizer(), list(tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


def test_half_a_character_waits_and_is_replaced_at_the_end() -> None:
    tokenizer = Tokenizer(bytes_only())
    first, second, *_ = tokenizer.encode("😀")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.step(first) == ""
    assert detokenizer.step(second) == ""
    assert detokenizer.flush() == REPLACEMENT


def bytes_only() -> tokenizers.Tokenizer:
    """A byte-level vocabulary without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@functools.cache
def sentence_pieces() -> Tokenizer:
    """A vocabulary like Llama 2's: spaces as U+2581, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁th"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "t")]
    vocabulary["▁t"] = len(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, eos_ids=[2])


@given(TEXTS)
def test_sentence_pieces_decode_as_the_whole_does(text: str) -> None:
    tokenizer = sentence_pieces()
    ids = list(tokenizer.encode(text))
    pieces = run(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


def test_the_prompt_decides_about_a_leading_space() -> None:
    tokenizer = sentence_pieces()
    prompt = tokenizer.encode("that")
    (token,) = tokenizer.encode("a")
    assert tokenizer.detokenizer().step(token) == "a"
    assert tokenizer.detokenizer(prompt).step(token) == " a"


def test_special_tokens_have_no_text() -> None:
    tokenizer = sentence_pieces()
    (token,) = tokenizer.encode("a")
    assert "".join(run(tokenizer.detokenizer(), [1, token, 2, token])) == "a a"


@pytest.mark.parametrize("count", [1, 3, 20])
def test_bytes_that_are_no_character_do_not_wait_for_ever(count: int) -> None:
    tokenizer = sentence_pieces()
    ids = [3 + 0xFF] * count
    pieces = run(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == REPLACEMENT * count


def test_markers_among_bytes() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.special_ids(["<|im_start|>", "the", "absent"])
    assert list(ids) == ["<|im_start|>"]
    (marker,) = ids.values()
    tokens = [*tokenizer.encode("é"), marker, *tokenizer.encode("x😀")]
    detokenizer = tokenizer.detokenizer((), ids.values())
    assert "".join(run(detokenizer, tokens)) == "é<|im_start|>x😀"


def test_half_a_character_before_a_marker() -> None:
    tokenizer = tiny_tokenizer()
    (marker,) = tokenizer.special_ids(["<|im_start|>"]).values()
    half = next(t for t in range(tokenizer.vocab_size) if tokenizer.spell(t) == "ð")
    detokenizer = tokenizer.detokenizer((), [marker])
    assert run(detokenizer, [half, marker]) == ["", REPLACEMENT + "<|im_start|>", ""]


def test_markers_among_sentence_pieces() -> None:
    tokenizer = sentence_pieces()
    (marker,) = tokenizer.special_ids(["<s>"]).values()
    text = list(tokenizer.encode("a the", add_special_tokens=False))
    detokenizer = tokenizer.detokenizer((), [marker])
    pieces = run(detokenizer, [*text, marker, *text])
    assert "".join(pieces).count("<s>") == 1
    before, after = "".join(pieces).split("<s>")
    assert before == tokenizer.decode(text)
    assert after.strip() == before.strip()
