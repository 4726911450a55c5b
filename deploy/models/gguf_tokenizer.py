"""Converts the tokenizer in a GGUF file to a Hugging Face one.

A GGUF file holds the vocabulary, the merges (or scores), and only the name of the pre-tokenizer,
``tokenizer.ggml.pre``. This module knows the definitions behind these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from baton.errors import ConfigError


class TokenType(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


TokenId = Annotated[int, Field(ge=0)]


class TokenizerMetadata(BaseModel):
    """The keys of a GGUF file that describe its tokenizer."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = Field(alias="tokenizer.ggml.model")
    pre: str = Field(default="default", alias="tokenizer.ggml.pre")
    tokens: list[str] = Field(alias="tokenizer.ggml.tokens", min_length=1)
    scores: list[float] | None = Field(default=None, alias="tokenizer.ggml.scores")
    token_type: list[int] | None = Field(default=None, alias="tokenizer.ggml.token_type")
    merges: list[str] | None = Field(default=None, alias="tokenizer.ggml.merges")
    bos: TokenId | None = Field(default=None, alias="tokenizer.ggml.bos_token_id")
    eos: TokenId | None = Field(default=None, alias="tokenizer.ggml.eos_token_id")
    eot: TokenId | None = Field(default=None, alias="tokenizer.ggml.eot_token_id")
    eom: TokenId | None = Field(default=None, alias="tokenizer.ggml.eom_token_id")
    unknown: TokenId | None = Field(default=None, alias="tokenizer.ggml.unknown_token_id")
    pad: TokenId | None = Field(default=None, alias="tokenizer.ggml.padding_token_id")
    add_bos: bool | None = Field(default=None, alias="tokenizer.ggml.add_bos_token")
    add_space_prefix: bool = Field(default=True, alias="tokenizer.ggml.add_space_prefix")
    chat_template: str | None = Field(default=None, alias="tokenizer.chat_template")

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer: the end of the sequence, of a turn, of a
        message."""
        return list(dict.fromkeys(i for i in (self.eos, self.eot, self.eom) if i is not None))


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a pre-tokenizer splits text before merges apply.

    Each pattern splits the pieces that the pattern before it produced.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    """Whether every digit becomes a separate piece, before the patterns."""
    gpt2_pattern: bool = False
    """Whether GPT-2's pattern comes last."""
    ignore_merges: bool = False
    """Whether a piece of text that is a whole token is used without merges."""
    nfc: bool = False
    add_bos: bool = False
    """Value of ``add_bos_token`` for a file without that key."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BREAKS}"
)

_GPT2_FAMILY = _PreTokenizer(gpt2_pattern=True)
_DIGITS_FAMILY = _PreTokenizer(digits=True, gpt2_pattern=True)
_LLAMA3_FAMILY = _PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_FAMILY = _PreTokenizer(patterns=(_QWEN2,), nfc=True)

_PRE_TOKENIZERS = {
    # llama.cpp does this with files that are older than the key.
    "default": _PreTokenizer(patterns=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_FAMILY,
    "phi-2": _GPT2_FAMILY,
    "mpt": _GPT2_FAMILY,
    "olmo": _GPT2_FAMILY,
    "smollm": _DIGITS_FAMILY,
    "starcoder": _DIGITS_FAMILY,
    "refact": _DIGITS_FAMILY,
    "codeshell": _DIGITS_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "smaug-bpe": _PreTokenizer(patterns=(_LLAMA3,)),
    "dbrx": _PreTokenizer(patterns=(_LLAMA3,)),
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "tekken": _PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}


def build_tokenizer(metadata: TokenizerMetadata) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes. Raises ConfigError."""
    _check(metadata)
    if metadata.model == "gpt2":
        tokenizer = _byte_level(metadata)
    elif metadata.model == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model {metadata.model!r} is not supported; gpt2 and llama are"
        )
    _add_tokens(tokenizer, metadata)
    tokenizer.post_processor = _post_processor(metadata)
    return tokenizer


def tokenizer_config(metadata: TokenizerMetadata, max_length: int) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``; ``max_length`` is in tokens."""
    config: dict[str, Any] = {
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": False,
        "bos_token": metadata.text(metadata.bos),
        "clean_up_tokenization_spaces": False,
        "eos_token": metadata.text(metadata.eos),
        "model_max_length": max_length,
        "pad_token": metadata.text(metadata.pad),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": metadata.text(metadata.unknown),
    }
    if metadata.chat_template is not None:
        config["chat_template"] = metadata.chat_template
    return config


def adds_bos(metadata: TokenizerMetadata) -> bool:
    """Whether the tokenizer puts a beginning-of-sequence token before plain text."""
    if metadata.bos is None:
        return False
    if metadata.add_bos is not None:
        return metadata.add_bos
    return metadata.model == "llama" or _pre_tokenizer(metadata.pre).add_bos


def _check(metadata: TokenizerMetadata) -> None:
    count = len(metadata.tokens)
    if len(set(metadata.tokens)) != count:
        raise ConfigError("tokenizer.ggml.tokens contains the same token twice")
    for name in ("scores", "token_type"):
        values = getattr(metadata, name)
        if values is not None and len(values) != count:
            raise ConfigError(
                f"tokenizer.ggml.{name} has {len(values)} entries, but there are {count} tokens"
            )
    for name in ("bos", "eos", "eot", "eom", "unknown", "pad"):
        token_id = getattr(metadata, name)
        if token_id is not None and token_id >= count:
            raise ConfigError(f"the {name} token's id {token_id} is not among {count} tokens")


def _pre_tokenizer(name: str) -> _PreTokenizer:
    known = _PRE_TOKENIZERS.get(name)
    if known is None:
        raise ConfigError(
            f"tokenizer.ggml.pre {name!r} is not supported; these are: "
            + ", ".join(sorted(_PRE_TOKENIZERS))
        )
    return known


def _byte_level(metadata: TokenizerMetadata) -> Tokenizer:
    if metadata.merges is None:
        raise ConfigError("tokenizer.ggml.merges is missing")
    pre = _pre_tokenizer(metadata.pre)
    vocab = {token: token_id for token_id, token in enumerate(metadata.tokens)}
    merges = [_split_merge(merge, vocab) for merge in metadata.merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _build_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise ConfigError(f"tokenizer.ggml.merges: {merge!r} does not join two tokens to a third")
    return left, right


def _build_pre_tokenizer(pre: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in pre.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_pattern))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(metadata: TokenizerMetadata) -> Tokenizer:
    if metadata.scores is None:
        raise ConfigError("tokenizer.ggml.scores is missing")
    prefix = metadata.add_space_prefix
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(metadata.tokens)},
            merges=merges_from_scores(metadata.tokens, metadata.scores, metadata.token_type),
            unk_token=metadata.text(metadata.unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int] | None
) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies, best first.

    SentencePiece joins the neighbors whose union has the best score. So every split of a token into
    two other tokens is a merge, ranked by the token's score.
    """
    normal = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if types is None or types[token_id] == TokenType.NORMAL
    }
    ranked = sorted(normal, key=lambda token: (-scores[normal[token]], normal[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]


def _add_tokens(tokenizer: Tokenizer, metadata: TokenizerMetadata) -> None:
    types = metadata.token_type or [TokenType.NORMAL] * len(metadata.tokens)
    special, plain = [], []
    for token, kind in zip(metadata.tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _post_processor(metadata: TokenizerMetadata) -> processors.PostProcessor:
    bos = metadata.text(metadata.bos)
    if bos is None or not adds_bos(metadata):
        return processors.TemplateProcessing(single=["$A:0"], pair=["$A:0", "$B:1"])
    return processors.TemplateProcessing(
        single=[bos, "$A:0"],
        pair=[bos, "$A:0", bos, "$B:1"],
        special_tokens=[(bos, metadata.bos)],
    )
