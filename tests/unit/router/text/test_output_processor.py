"""What clients are shown, and what is counted."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from router.core.request import OutputDelta
from router.text.output_processor import REPLACEMENT, Detokenizer, OutputProcessor, StopStrings
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import tiny_backend, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
(EOS,) = TOKENIZER.eos_ids


def assembler(stop: Sequence[str] = (), hidden: Sequence[int] = (EOS,)) -> OutputProcessor:
    return OutputProcessor(TOKENIZER.detokenizer(), stop, hidden)


def push_all(
    target: OutputProcessor, rows: Sequence[Sequence[int]], finish: FinishReason
) -> list[OutputDelta]:
    deltas = [target.push(row) for row in rows]
    deltas.append(target.push((), finish))
    return [delta for delta in deltas if delta is not None]


def text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_end_of_sequence_counts_and_is_not_shown() -> None:
    ids = TOKENIZER.encode("Paris")
    delta = assembler().push([*ids, EOS], FinishReason.STOP)
    assert delta == OutputDelta("Paris", (*ids, EOS), FinishReason.STOP)


def test_a_stop_token_with_text_is_not_shown() -> None:
    ids = TOKENIZER.encode("Paris, and")
    delta = assembler(hidden=(EOS, ids[-1])).push(ids, FinishReason.STOP)
    assert delta is not None
    assert delta.text == TOKENIZER.decode(ids[:-1])
    assert delta.token_ids == ids


def test_stop_text_across_tokens_ends_it_and_later_tokens_do_not_count() -> None:
    ids = TOKENIZER.encode("one two END three")
    target = assembler(["END"])
    deltas = [delta for token in ids if (delta := target.push([token])) is not None]
    counted = [token for delta in deltas for token in delta.token_ids]
    assert text_of(deltas) == "one two "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert target.stopped
    assert target.finished
    assert TOKENIZER.decode(counted) == "one two END"
    assert target.push([5], FinishReason.LENGTH) is None


def test_a_stop_that_does_not_come_is_shown_at_the_end() -> None:
    target = assembler(["Paris!"])
    deltas = push_all(target, [[token] for token in TOKENIZER.encode("Paris")], FinishReason.LENGTH)
    assert text_of(deltas) == "Paris"
    assert not target.stopped


def test_stop_inside_one_push_overrules_the_workers_reason() -> None:
    target = assembler(["two"])
    delta = target.push(TOKENIZER.encode("one two three"), FinishReason.LENGTH)
    assert delta is not None
    assert (delta.text, delta.finish_reason, target.stopped) == ("one ", FinishReason.STOP, True)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    ids = TOKENIZER.encode("one two one two three")
    first = len(TOKENIZER.encode("one two"))
    target = OutputProcessor(TOKENIZER.detokenizer(), ["two"], (EOS,), min_tokens=first)
    deltas = [delta for token in ids if (delta := target.push([token])) is not None]
    assert text_of(deltas) == "one two one "
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_min_tokens_beyond_the_answer_leaves_the_workers_reason() -> None:
    ids = TOKENIZER.encode("one two")
    target = OutputProcessor(TOKENIZER.detokenizer(), ["two"], (EOS,), min_tokens=len(ids))
    delta = target.push(ids, FinishReason.LENGTH)
    assert delta == OutputDelta("one two", ids, FinishReason.LENGTH)


def test_cached_tokens_travel_and_silence_makes_no_delta() -> None:
    target = assembler()
    assert target.push(()) is None
    delta = target.push((), None, 7)
    assert delta == OutputDelta("", (), None, 7)


@given(
    st.lists(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=5), max_size=8),
    st.lists(st.text(" aeinot", min_size=1, max_size=3), max_size=2),
)
def test_streamed_equals_whole(rows: list[list[int]], stop: list[str]) -> None:
    streamed = push_all(assembler(stop, ()), rows, FinishReason.LENGTH)
    flat = [token for row in rows for token in row]
    whole = assembler(stop, ()).push(flat, FinishReason.LENGTH)
    assert whole is not None
    assert text_of(streamed) == whole.text
    assert tuple(t for delta in streamed for t in delta.token_ids) == whole.token_ids
    assert streamed[-1].finish_reason == whole.finish_reason
    if whole.finish_reason is FinishReason.LENGTH:
        assert whole.text == TOKENIZER.decode(flat)


def real_folders() -> list[Path]:
    """Model folders that an earlier pull has left."""
    cache = Path.home() / ".cache/baton"
    files = cache.rglob("tokenizer.json") if cache.is_dir() else ()
    return sorted(file.parent for file in files if (file.parent / "config.json").is_file())


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    folders = real_folders()
    if not folders:
        pytest.skip("no model was pulled to ~/.cache/baton")
    return Tokenizer.load(folders[0])


@settings(max_examples=60)
@given(data=st.data())
def test_the_real_vocabulary(real: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=30))
    deltas = push_all(
        OutputProcessor(real.detokenizer()), [[token] for token in ids], FinishReason.LENGTH
    )
    assert text_of(deltas) == real.decode(ids)


@settings(max_examples=60)
@given(data=st.data())
def test_the_real_vocabulary_on_text(real: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    ids = real.encode(text, add_special_tokens=False)
    deltas = push_all(
        OutputProcessor(real.detokenizer()), [[token] for token in ids], FinishReason.LENGTH
    )
    assert text_of(deltas) == real.decode(ids)
    assert json.loads(json.dumps(text_of(deltas))) == text_of(deltas)


WORDS = st.text(alphabet="ab \u00fc\U0001f600", max_size=24)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(WORDS, st.lists(WORDS.filter(bool), max_size=2), st.data(), st.booleans())
def test_the_tokens_that_are_scored_are_those_that_are_shown(
    text: str, stop: list[str], data: st.DataObject, include: bool
) -> None:
    """However the tokens come; and the scores do not change what is shown and counted."""
    ids = [*TOKENIZER.encode(text), EOS]
    scores = [TokenLogprobs(-float(place)) for place in range(len(ids))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    scored = OutputProcessor(TOKENIZER.detokenizer(), stop, (EOS,), include_stop=include)
    plain = OutputProcessor(TOKENIZER.detokenizer(), stop, (EOS,), include_stop=include)
    deltas = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        finish = FinishReason.STOP if end == len(ids) else None
        for target, logprobs in ((scored, scores[start:end]), (plain, ())):
            deltas.append(target.push(ids[start:end], finish, logprobs=logprobs))
    given_ = [delta for delta in deltas[::2] if delta is not None]
    bare = [delta for delta in deltas[1::2] if delta is not None]
    assert text_of(given_) == text_of(bare)
    assert [d.token_ids for d in given_] == [d.token_ids for d in bare]
    assert not any(delta.scored for delta in bare)
    tokens = [token for delta in given_ for token in delta.scored]
    assert [t.token_id for t in tokens] == ids[: len(tokens)], "a token is missing or twice"
    assert [t.logprobs for t in tokens] == scores[: len(tokens)]
    shown = b"".join(TOKENIZER.spelling(t.token_id) for t in tokens if not t.hidden)
    whole = text_of(given_)
    assert shown.decode(errors="ignore").startswith(whole)
    if scored.stopped:
        assert all(token.offset < max(1, len(whole)) for token in tokens)
    else:
        assert shown.decode() == whole
        assert tokens[-1].hidden


# Stop strings

LETTERS = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def scan(pieces: list[str], stop: list[str]) -> tuple[str, str]:
    scanner = StopStrings(stop)
    shown = "".join(scanner.feed(piece) for piece in pieces)
    return shown + ("" if scanner.found else scanner.rest()), scanner.match


def expected(text: str, stop: list[str]) -> tuple[str, str]:
    """Read character by character; stop as soon as a stop string is complete: which one."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(st.lists(LETTERS, max_size=6), STOPS)
def test_stop_strings_are_found_however_text_is_cut(pieces: list[str], stop: list[str]) -> None:
    assert scan(pieces, stop) == expected("".join(pieces), stop)


@given(LETTERS, STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    scanner = StopStrings(stop)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += scanner.feed(character)
        if scanner.found:
            return
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    scanner = StopStrings(["END"])
    assert scanner.feed("some text E") == "some text "
    assert scanner.feed("x") == "Ex"


def test_nothing_follows_a_stop_string() -> None:
    scanner = StopStrings(["."])
    assert scanner.feed("a. b") == "a"
    assert scanner.feed("more") == ""
    assert scanner.rest() == ""


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
