"""The model's tokenizer: text to token ids and back, ends of sequence, chat template."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from baton.errors import ConfigError, InvalidRequest
from baton.grammars.compiled_grammars import grammars_of
from router.text.chat_template import ChatTemplate, load_chat_template
from router.text.output_processor import (
    ByteDetokenizer,
    Detokenizer,
    MarkerDetokenizer,
    WindowDetokenizer,
)

PIECE_CHARACTERS = 1 << 18
"""Size of the pieces of a long text, in characters. The tokens of such a text are counted piece by
piece before the text is tokenized as a whole."""
PIECES_SHARE = 0.95
"""Lower bound on the number of tokens of a text, as a fraction of the sum over the pieces of the
text."""
_CONTEXT_TOKENS = 8
"""Number of tokens at the prompt's end that influence the text of the answer's first token."""


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the model's end-of-sequence tokens, compiled grammars and
    chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Create a tokenizer. ``vocab_size`` is the number of rows of the model's embeddings; None
        means that the tokenizer's ids have one row each."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = chat_template
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = vocab_size or largest + 1
        self._exceeds_model = largest >= self.vocab_size
        # The model never draws a token for which it has no row.
        self.eos_ids = frozenset(number for number in eos_ids if 0 <= number < self.vocab_size)
        # The router compiles grammars to check them; workers compile those that they receive.
        self.grammars = grammars_of(backend.to_str, self.vocab_size, sorted(self.eos_ids))
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(number for number, token in added.items() if token.special)
        layout = json.loads(backend.to_str())
        self._byte_level = _is_byte_level(layout.get("decoder"))
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        """Text of each token that is whole characters, with and without the names of special
        tokens."""
        strips = any(token.lstrip or token.rstrip for token in added.values())
        shrinks = layout.get("normalizer") is not None or strips
        self._longest = 0 if shrinks else max(map(len, backend.get_vocab(True)), default=0)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer from a model's folder. Raises ConfigError with the name of a bad
        file."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} cannot be read: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json")
        special = _special_tokens(settings)
        generation = _read_json(folder / "generation_config.json")
        eos = [*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
        named = backend.token_to_id(special.get("eos_token", ""))
        return cls(
            backend,
            eos_ids=eos if named is None else [*eos, named],
            vocab_size=_rows(model),
            chat_template=load_chat_template(folder, settings, special),
        )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        last: int | None = None,
        check: Callable[[int], None] = lambda count: None,
    ) -> tuple[int, ...]:
        """Return the token ids of ``text``, or only the last ``last`` of them.

        ``check`` is called with the number of token ids before they are copied to Python. Copying
        holds the interpreter lock; tokenizing releases it. Raises what ``check`` raises.
        """
        if len(text) > PIECE_CHARACTERS:
            text = self._within_bounds(text, last, check)
        found = self._encoded(text, special=add_special_tokens)
        if last is not None and len(found) > last:
            found.truncate(last, direction="left")
        check(len(found))
        return tuple(found.ids)

    def _encoded(self, text: str, *, special: bool) -> tokenizers.Encoding:
        # Only the library's batched calls release the interpreter lock.
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0]

    def _within_bounds(self, text: str, last: int | None, check: Callable[[int], None]) -> str:
        """Return ``text``, or only a part of its end that has at least ``last`` tokens. Raises what
        ``check`` raises.

        The library needs about 380 bytes per token, so tokens are counted piece by piece first.
        """
        count = 0
        for end in range(len(text), 0, -PIECE_CHARACTERS):
            begin = max(0, end - PIECE_CHARACTERS)
            if last is not None and count * PIECES_SHARE > last:
                return text[begin:]
            count += len(self._encoded(text[begin:end], special=False))
            if last is None:
                # A word that is split between pieces may have more tokens than in the whole text.
                check(int(count * PIECES_SHARE))
        return text

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of ``text``, without tokenizing it."""
        return -(-len(text) // self._longest) if self._longest else 0

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises InvalidRequest if the model has none."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self._template

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of those ``texts`` that are special tokens, by text."""
        ids = ((text, self._backend.token_to_id(text)) for text in texts)
        return {text: number for text, number in ids if number in self._special}

    def marker_ids(self, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a marker if they do not depend on the text around it, or None.

        They are fixed if the marker begins and ends with added tokens. None also if the model has
        no embedding for one of them.
        """
        ids = self.encode(text, add_special_tokens=False)
        if not ids or max(ids) >= self.vocab_size:
            return None
        return ids if self._added.issuperset((ids[0], ids[-1])) else None

    def check_embedded(self, token_ids: Sequence[int], param: str) -> None:
        """Check that the model has an embedding for each token of a text. Raises InvalidRequest.

        Some tokenizers have added tokens beyond the model's embeddings. For any other tokenizer,
        nothing is searched. ``param``: the name of the client's field that has the text.
        """
        if not self._exceeds_model or not token_ids or max(token_ids) < self.vocab_size:
            return
        bad = next(number for number in token_ids if number >= self.vocab_size)
        raise InvalidRequest(
            f"{param} contains the text of the token {json.dumps(self.spell(bad))} (id {bad}), for"
            f" which the model has no embedding: its ids end at {self.vocab_size - 1}; remove that"
            " text",
            param=param,
        )

    async def start(self) -> None:
        """Start the chat template's process, if the model has a template, and load grammars.

        Raises ConfigError if the template does not compile, BatonError if no process starts.
        """
        if self._template is not None:
            await self._template.start()
        await asyncio.to_thread(self.grammars.prepare)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        *,
        generation_prompt: bool = True,
    ) -> Future[str]:
        """Render messages to a text of at most ``limit`` characters; see ``ChatTemplate.render``.

        ``tools`` other than None, even an empty list, select the template for tools. The template
        writes the special tokens, so ``encode`` the text with ``add_special_tokens=False``. Raises
        InvalidRequest if the model has no template.
        """
        template = self.chat_template if tools is None else self.chat_template.for_tools
        return template.render(messages, limit, tools, more, generation_prompt=generation_prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; "" for an id without text."""
        return self._backend.id_to_token(token_id) or ""

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        shown_ids: Iterable[int] = (),
        *,
        special_tokens: bool = False,
    ) -> Detokenizer:
        """Create a detokenizer for an answer to ``prompt_ids``.

        The text of special tokens is hidden, except for those of ``shown_ids``. ``special_tokens``:
        the text of all special tokens is shown.
        """
        plain = self._plain_detokenizer(prompt_ids, special_tokens=special_tokens)
        texts = {} if special_tokens else {token_id: self.spell(token_id) for token_id in shown_ids}
        return MarkerDetokenizer(plain, texts) if texts else plain

    def _plain_detokenizer(self, prompt_ids: Sequence[int], *, special_tokens: bool) -> Detokenizer:
        if self._byte_level:
            spell = self.spelling if special_tokens else self._token_bytes
            return ByteDetokenizer(spell, self._texts[special_tokens])
        context = prompt_ids[-_CONTEXT_TOKENS:]
        if special_tokens:
            return WindowDetokenizer(self._decode_all, lambda token_id: False, context)
        return WindowDetokenizer(self.decode, self._special.__contains__, context)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, so that it has no text in an answer."""
        return token_id in self._special

    def spelling(self, token_id: int) -> bytes:
        """Return a token's bytes, perhaps part of a character; for a special token, its name."""
        if token_id in self._special:
            return (self._backend.id_to_token(token_id) or "").encode()
        return self._token_bytes(token_id)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if not self._byte_level:
            return _spell_piece(token)
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # added tokens do not use the byte alphabet
            return token.encode()


def _spell_piece(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: ``▁`` is a space, ``<0xE2>`` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        with contextlib.suppress(ValueError):
            return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level vocabularies: printable Latin-1
    stands for itself, and characters from U+0100 on for the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must contain a JSON object")
    return content


def _rows(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the model's embeddings, from a config.json; None if it does not
    say. A model for text and images has a separate section for text."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, dict) else config
    return fields.get("vocab_size")


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token that a tokenizer_config.json names, by its name, such
    as ``bos_token``."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
