"""Grammars for tests: a small byte-level tokenizer, and what follows a text through a matcher."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind, TokenMatcher
from baton.grammars.compiled_grammars import CompiledGrammars, grammars_of
from baton.grammars.grammar_gate import GrammarGate
from engine.sampling.grammar_state import AnswerState, GrammarState, masks_of, unpack

_CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["x", "yy"], "kind": true}',
    "yes no maybe, null false",
]
END = "<|end|>"
WAIT_S = 20.0


@functools.cache
def small_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of 330 tokens; its vocabulary fills no whole number of words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


def end_id() -> int:
    found = small_tokenizer().token_to_id(END)
    assert found is not None
    return found


def vocab_size() -> int:
    return small_tokenizer().get_vocab_size(with_added_tokens=True)


@functools.cache
def small_grammars() -> CompiledGrammars[TokenMatcher]:
    return grammars_of(small_tokenizer().to_str, vocab_size(), [end_id()])


def schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def encode(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False).ids


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text, and end there."""
    state = GrammarState(small_grammars().matcher(grammar), vocab_size())
    return all(follow(state, [*encode(text), end_id()]))


def follow(state: GrammarState, token_ids: Iterable[int]) -> Iterable[bool]:
    """Go on by tokens as long as they are allowed; whether each one is."""
    for token in token_ids:
        allowed = token in allowed_in(state)
        yield allowed
        if not allowed:
            return
        state.advance([token])


def allowed_in(state: AnswerState) -> set[int]:
    (mask,) = masks_of(state)
    return set(unpack(mask, vocab_size()).nonzero()[0].tolist())


class SlowGrammars:
    """Compiles when it is let; a text that begins with "bad" is refused, and "held" waits alone."""

    def __init__(self, max_grammars: int = 64) -> None:
        self.may_go = threading.Event()
        self.release_held = threading.Event()
        self.compiled: list[str] = []
        self.seconds: list[float] = []
        self.grammars = CompiledGrammars[TokenMatcher](
            lambda: self.compile, vocab_size(), max_grammars=max_grammars
        )
        self.gate = GrammarGate(self.grammars, self.seconds.append)

    def compile(self, grammar: Grammar) -> TokenMatcher:
        may_go = self.release_held if grammar.text == "held" else self.may_go
        assert may_go.wait(WAIT_S)
        self.compiled.append(grammar.text)
        if grammar.text.startswith("bad"):
            raise InvalidGrammar("it is bad")
        return small_grammars().matcher(grammar)
