"""Kinds of model folders for comparisons with transformers: how their tokenizers are saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the weather in Paris, and in Rome?",
    "user assistant system tool function name arguments content {} [] <> | : , ' \" \n\n 0123456",
    "It doesn't rain; they're dry. Ça va? 東京 é ü 😎",
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
Files = Mapping[str, Any]


def byte_level(*, special: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE, as GPT-2's. With ``special``, it has the tokens of ``NAMES``."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(NAMES.values()) if special else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _other(model: Any, trainer: Any, pre: Any, decoder: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre, decoder
    options: dict[str, Any] = {"special_tokens": list(NAMES.values()), "show_progress": False}
    if trainer is trainers.UnigramTrainer:
        options["unk_token"] = "<unk>"
    backend.train_from_iterator(CORPUS, trainer(vocab_size=300, **options))
    return backend


def unigram() -> tokenizers.Tokenizer:
    pre = pre_tokenizers.Metaspace()
    return _other(models.Unigram(), trainers.UnigramTrainer, pre, decoders.Metaspace())


def word_pieces() -> tokenizers.Tokenizer:
    backend = _other(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer,
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=False),
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    return backend


def words() -> tokenizers.Tokenizer:
    model = models.WordLevel(unk_token="<unk>")
    pre = pre_tokenizers.Whitespace()
    return _other(model, trainers.WordLevelTrainer, pre, decoders.Fuse())


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    number = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", number)]
    )
    return backend


def bounded(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.enable_truncation(8)
    backend.enable_padding(length=64, pad_id=3, pad_token="<pad>")
    return backend


def _save(folder: Path, backend: tokenizers.Tokenizer, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": 1000}
    backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": config} | dict(files)).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **FLAGS, **flags}


def _listed(*tokens: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(number): token for number, token in tokens}}


def _own(backend: tokenizers.Tokenizer, **changes: dict[str, Any]) -> dict[str, Any]:
    """The list of a tokenizer's own added tokens, as transformers 4 writes it, with changes."""
    tokens = backend.get_added_tokens_decoder().items()
    return _listed(
        *(
            (number, _token(one.content, special=True) | changes.get(one.content, {}))
            for number, one in tokens
        )
    )


def _written(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> None:
    _save(folder, backend, files)


def _by_class(folder: Path, kind: Any, model_type: str, backend: tokenizers.Tokenizer) -> None:
    """A folder that a class of transformers has saved."""
    layout = json.loads(backend.to_str())["model"]
    tokenizer = kind(vocab=layout["vocab"], merges=[tuple(pair) for pair in layout["merges"]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = {"model_type": model_type, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(config))


def _metaspace_bpe(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*special, *bytes_], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _saved(folder: Path) -> None:
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=with_bos(byte_level()), **NAMES)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 1000}')


SETTINGS: dict[str, Any] = dict(NAMES)
KINDS: Mapping[str, Callable[[Path], None]] = {
    "saved by transformers": _saved,
    "tokenizer.json alone": lambda folder: _written(folder, byte_level()),
    "special tokens in the map": lambda folder: _written(
        folder, byte_level(), tokenizer_config={}, special_tokens_map=NAMES
    ),
    "objects in the map": lambda folder: _written(
        folder,
        byte_level(special=False),
        tokenizer_config={"eos_token": "<other>"},
        special_tokens_map={
            name: _token(text, lstrip=name == "eos_token") for name, text in NAMES.items()
        },
    ),
    "a list of added tokens, which the map does not change": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS | _own(byte_level()),
        special_tokens_map={"eos_token": "<pad>"},
    ),
    "a list with other flags": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS
        | _own(byte_level(), **{"</s>": {"lstrip": True}, "<pad>": {"special": False}}),
    ),
    "a list with further tokens": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS
        | _listed((901, _token("<tool>")), (900, _token("<think>", special=True, rstrip=True))),
    ),
    "added_tokens.json": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS | {"cls_token": "<cls>"},
        added_tokens={"<tool>": 402, "<cls>": 401, "<think>": 403},
    ),
    "additional special tokens": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    ),
    "additional special tokens in the map": lambda folder: _written(
        folder,
        byte_level(),
        special_tokens_map=NAMES | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    ),
    "extra special tokens by name": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS
        | {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
    ),
    "a list of objects with a type": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config={
            **{name: _token(text) | {"__type": "AddedToken"} for name, text in NAMES.items()},
            "extra_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    ),
    "BOS by the post-processor": lambda folder: _written(
        folder,
        with_bos(byte_level()),
        tokenizer_config=SETTINGS | {"add_bos_token": False, "add_eos_token": True},
    ),
    "flags for BOS and EOS alone": lambda folder: _written(
        folder,
        byte_level(),
        tokenizer_config=SETTINGS | {"add_bos_token": True, "add_eos_token": True},
    ),
    "special tokens that are split": lambda folder: _written(
        folder, byte_level(), tokenizer_config=SETTINGS | {"split_special_tokens": True}
    ),
    "truncation and padding": lambda folder: _written(
        folder, bounded(byte_level()), tokenizer_config=SETTINGS
    ),
    "Unigram": lambda folder: _written(folder, unigram(), tokenizer_config=SETTINGS),
    "WordPiece": lambda folder: _written(folder, word_pieces(), tokenizer_config=SETTINGS),
    "WordLevel": lambda folder: _written(folder, words(), special_tokens_map=NAMES),
    "the class of Llama": lambda folder: _by_class(
        folder, LlamaTokenizer, "llama", _metaspace_bpe(("<unk>", "<s>", "</s>"))
    ),
    "the class of Qwen": lambda folder: _by_class(
        folder, Qwen2Tokenizer, "qwen3", byte_level(special=False)
    ),
    "the class of Gemma": lambda folder: _by_class(
        folder,
        GemmaTokenizer,
        "gemma3_text",
        _metaspace_bpe(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")),
    ),
}
"""Functions that write a folder, by the kind of folder."""
