"""Makes conversations of the target model with itself, and reads and writes their files: the
training data of a draft head.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from engine.cpu.sampler import cpu_sampler
from engine.engine import Engine
from engine.sampling.sampling import SampleRow, sample
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from loadtest.engine.speculation_prompts import copying_tasks
from router.text.tokenizer import Tokenizer

_OWN_TASKS = 0.15
"""Share of the conversations whose task is about text of Baton's documentation or sources."""
_TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
"""Temperatures at which answers are generated. The head must draft well for greedy and for sampled
answers."""
_QUESTION_TOKENS, _ANSWER_TOKENS = 96, 320
_MAX_TOKENS = 768
_MARK = "\x1a"
"""Placeholder for the user's text in the rendered chat template, at which the template is split."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of the target with itself, and its hidden states."""

    token_ids: torch.Tensor
    """Token ids of the conversation, int32 [tokens]."""
    hidden: torch.Tensor
    """Outputs of the recorded layers for every token of the conversation, bf16 [tokens, layers,
    hidden_size]."""
    answer: int
    """Index of the answer's first token. The tokens before it are not part of an answer of the
    target."""


@dataclass(slots=True)
class _Talk:
    token_ids: list[int]
    blocks: tuple[int, ...]
    sampling: SamplingParams
    answer: int = 0
    """Index of the answer's first token; 0 while the question is generated."""
    limit: int = 0
    computed: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)


class SelfTalk:
    """Runs many conversations at the same time on one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        layers: Sequence[int],
        seed: int,
        at_a_time: int = 48,
    ) -> None:
        """``layers`` are the layers whose outputs are recorded. Raises BatonError if the model has
        no chat template.
        """
        self._engine = engine
        sampler = cpu_sampler()
        self._sample = sample if sampler is None else sampler.sample
        self._layers = tuple(layers)
        self._random = random.Random(seed)  # noqa: S311 - it chooses what is talked about
        self._tokenizer = tokenizer
        whole = tokenizer.render_chat([{"role": "user", "content": _MARK}], 1 << 20).result()
        before, _, after = whole.partition(_MARK)
        self._before, self._after = self._encode(before), self._encode(after)
        ends = {*engine.config.eos_ids, self._after[0]}
        self._ends = tuple(ends)
        self._tasks = [self._encode(task) for task in copying_tasks()]
        size = engine.cache.block_size
        each = -(-_MAX_TOKENS // size)
        count = min(at_a_time, engine.cache.blocks // each)
        self._talks = [self._begin(tuple(range(n * each, (n + 1) * each))) for n in range(count)]

    def step(self) -> Iterator[Conversation]:
        """Run one step of all conversations. Yield those that have ended, and start others in their
        place.
        """
        talks = self._talks
        rows = tuple(
            PlanRow(n, talk.computed, len(talk.token_ids) - talk.computed, talk.blocks, True)
            for n, talk in enumerate(talks)
        )
        token_ids: list[int] = []
        outputs: list[int] = []
        for talk in talks:
            token_ids += talk.token_ids[talk.computed :]
            outputs.append(len(token_ids) - 1)
        found = self._engine.runner.model.run(
            StepInput(rows, token_ids, outputs, False, hidden_layers=self._layers)
        )
        assert found.logits is not None
        assert found.hidden is not None
        draws = [SampleRow(t.sampling, t.token_ids, len(t.token_ids), ()) for t in talks]
        drawn = self._sample(found.logits, draws)
        hidden = torch.split(found.hidden.to(torch.bfloat16), [row.count for row in rows])
        for place, (talk, token, states) in enumerate(zip(talks, drawn, hidden, strict=True)):
            talk.computed = len(talk.token_ids)
            talk.hidden.append(states)
            if self._went_on(talk, token):
                continue
            if talk.answer < len(talk.token_ids):
                yield Conversation(
                    torch.tensor(talk.token_ids, dtype=torch.int32),
                    torch.cat(talk.hidden),
                    talk.answer,
                )
            talks[place] = self._begin(talk.blocks)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _begin(self, blocks: tuple[int, ...]) -> _Talk:
        seed = self._random.getrandbits(63)
        if self._random.random() < _OWN_TASKS:
            task = self._random.choice(self._tasks)[: _MAX_TOKENS // 2]
            talk = _Talk([*self._before, *task], blocks, SamplingParams())
            self._turn(talk)
            return talk
        limit = len(self._before) + _QUESTION_TOKENS
        # Texts at higher temperatures are seldom questions.
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        return _Talk(list(self._before), blocks, sampling, limit=limit)

    def _turn(self, talk: _Talk) -> None:
        """Start the answer of a conversation whose question is complete."""
        talk.token_ids += self._after
        talk.answer = len(talk.token_ids)
        talk.limit = min(_MAX_TOKENS, talk.answer + _ANSWER_TOKENS)
        temperature = self._random.choice(_TEMPERATURES)
        seed = self._random.getrandbits(63)
        talk.sampling = SamplingParams(temperature=temperature, seed=seed)

    def _went_on(self, talk: _Talk, token: int) -> bool:
        if talk.answer:
            talk.token_ids.append(token)
            if token not in self._ends and len(talk.token_ids) < talk.limit:
                return True
            # The last token was sampled but not computed, so it has no hidden states.
            talk.token_ids.pop()
            return False
        if token not in self._ends and len(talk.token_ids) < talk.limit:
            talk.token_ids.append(token)
        elif len(talk.token_ids) > len(self._before):
            self._turn(talk)
        else:
            return False
        return True


def save_conversations(conversations: Sequence[Conversation], path: Path) -> None:
    """Write conversations to one file."""
    save_file(
        {
            "token_ids": torch.cat([each.token_ids for each in conversations]),
            "hidden": torch.cat([each.hidden for each in conversations]),
            "lengths": torch.tensor([len(each.token_ids) for each in conversations]),
            "answers": torch.tensor([each.answer for each in conversations]),
        },
        path,
    )


def load_conversations(folder: Path) -> list[Conversation]:
    """Read the conversations from all files of a folder. Raises ConfigError if there are none."""
    found = [each for path in sorted(folder.glob("*.safetensors")) for each in _of(path)]
    if not found:
        raise ConfigError(f"{folder} has no conversations")
    return found


def _of(path: Path) -> Iterator[Conversation]:
    try:
        parts = load_file(path)
        tokens, hidden = parts["token_ids"], parts["hidden"]
        lengths, answers = parts["lengths"].tolist(), parts["answers"].tolist()
    except (OSError, SafetensorError, LookupError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    start = 0
    for length, answer in zip(lengths, answers, strict=True):
        end = start + length
        yield Conversation(tokens[start:end], hidden[start:end], answer)
        start = end
