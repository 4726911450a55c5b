"""The program that tries a tokenizer.json, in a process of baton.sandbox.

Requests and answers:

    {"file": "/.../tokenizer.json", "added": {...}}    {}, {"refused": "why"}

``added`` is what ``add_tokens`` takes. The library aborts its process if it gets no memory, and
some short files make it ask for much.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

_SPARE_IDS = 1 << 20
"""Ids that a vocabulary may leave out, in addition to three for each of its tokens."""
_MAX_ADDED_TOKENS = 1 << 16
_TEXTS = (
    "The quick brown fox. " * 200,
    "a" * 4096,
    " " * 4096,
    "\n\t\u65e5\U0001f600e\u0301" * 500,
)
"""Texts to encode: words, runs, and characters that have several bytes."""
_MAX_GROWTH = 16
"""Maximum number of tokens for each byte of a text."""


def prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that tries a file."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            text = Path(request["file"]).read_text(encoding="utf-8")
            _check(json.loads(text))
            backend = tokenizers.Tokenizer.from_str(text)
            add_tokens(backend, request["added"])
            _try(backend)
        except MemoryError:
            raise
        except Exception as error:  # the library raises bare Exception
            return {"refused": str(error) or type(error).__name__}
        return {}

    return answer


def add_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Any]) -> None:
    """Add the tokens that the files next to a tokenizer.json have, as transformers does.

    Tokens are objects with ``content`` and flags. ``added`` has these fields:

    - ``by_id``: tokens that also have their ``id``, which decides their order. The ids of new
      tokens follow those of the vocabulary.
    - ``keeps``: whether the tokenizer's own added tokens keep their flags.
    - ``named`` and ``extra``: special tokens, which are added if the tokenizer lacks them. Those of
      ``named`` are special in any case.

    Raises ValueError if there are too many.
    """
    if sum(len(added[field]) for field in ("by_id", "named", "extra")) > _MAX_ADDED_TOKENS:
        raise ValueError(f"there are more than {_MAX_ADDED_TOKENS} added tokens")
    own = backend.get_added_tokens_decoder()
    by_id = {one["id"]: _added_token(one) for one in added["by_id"]}
    if added["keeps"]:
        by_id |= own
    tokens = [by_id[number] for number in sorted(by_id)]
    named = {one["content"] for one in added["named"]}
    for token in tokens:
        token.special = token.special or token.content in named
    known = {token.content for token in (*own.values(), *tokens)}
    for one in (*added["named"], *added["extra"]):
        if one["content"] not in known:
            known.add(one["content"])
            tokens.append(_added_token(one))
    backend.add_tokens(tokens)


def _added_token(one: Mapping[str, Any]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(**{name: one[name] for name in one if name != "id"})


def _check(content: Any) -> None:
    """Raise ValueError for a vocabulary whose ids are no ids, or are much larger than it.

    The library takes memory for ids that no token has.
    """
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError("model must be an object")
    vocab = content["model"].get("vocab")
    if not isinstance(vocab, dict | list):
        raise ValueError("model.vocab must be an object or a list")
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise ValueError("added_tokens must be a list of objects")
    if len(added) > _MAX_ADDED_TOKENS:
        raise ValueError(f"added_tokens has more than {_MAX_ADDED_TOKENS} entries")
    bound = 4 * (len(vocab) + len(added)) + _SPARE_IDS
    ids = {"model.vocab": list(vocab.values()) if isinstance(vocab, dict) else []}
    ids["added_tokens"] = [one.get("id") for one in added]
    for field, found in ids.items():
        for one in found:
            if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < bound:
                raise ValueError(f"{field} has the id {one!r}; ids must be 0 to {bound - 1}")


def _try(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode some texts. Raises ValueError if they have unreasonably many tokens."""
    backend.no_truncation()
    backend.no_padding()
    for text in _TEXTS:
        ids = backend.encode(text).ids
        if len(ids) > _MAX_GROWTH * len(text.encode()):
            raise ValueError(f"{len(text)} characters have {len(ids)} tokens")
        backend.decode(ids)
