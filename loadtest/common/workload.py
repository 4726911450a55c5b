"""Defines the workloads for all servers: their requests, and the concurrency."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.errors import ConfigError

Kind = Literal["random", "shared-prefixes", "chat"]

VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community"
)
"""Words that make up the prompts. In most vocabularies, each word with the space before it is one
token."""
_PREFIXES = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop that keeps ``concurrency`` requests in flight until ``requests`` have been
    sent."""

    name: str
    kind: Kind
    concurrency: int
    requests: int
    input_tokens: int
    """Number of tokens of each prompt; approximate for chats. If the prompts share a prefix, it is
    not included."""
    output_tokens: int
    """Number of tokens of each answer. Approximate for chats."""
    prefix_tokens: int = 0

    @property
    def title(self) -> str:
        """Return the workload's title for a column, such as ``b: c8 128/128``: name, concurrency,
        input and output tokens.
        """
        prefix = f"{self.prefix_tokens}+" if self.prefix_tokens else ""
        about = "about " if self.kind == "chat" else ""
        tokens = f"{about}{prefix}{self.input_tokens}/{self.output_tokens}"
        return f"{self.name}: c{self.concurrency} {tokens}"

    def client_options(self, seed: int, folder: Path) -> list[str]:
        """Return the options with which `vllm bench serve` makes this workload's prompts. Files
        that it needs are written to ``folder``.
        """
        if self.kind == "random":
            return [
                "--dataset-name=random",
                f"--random-input-len={self.input_tokens}",
                f"--random-output-len={self.output_tokens}",
            ]
        if self.kind == "shared-prefixes":
            return [
                "--dataset-name=prefix_repetition",
                f"--prefix-repetition-prefix-len={self.prefix_tokens}",
                f"--prefix-repetition-suffix-len={self.input_tokens}",
                f"--prefix-repetition-num-prefixes={_PREFIXES}",
                f"--prefix-repetition-output-len={self.output_tokens}",
            ]
        path = folder / "chats.jsonl"
        write_chats(path, self.requests, seed)
        return [
            "--dataset-name=custom",
            f"--dataset-path={path}",
            "--custom-output-len=-1",
            "--skip-chat-template",
            "--disable-shuffle",
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("a", "random", 1, 8, 128, 128),
        Workload("b", "random", 8, 48, 128, 128),
        Workload("c", "random", 32, 128, 128, 128),
        Workload("d", "random", 4, 24, 1024, 64),
        Workload("e", "shared-prefixes", 8, 96, 64, 64, prefix_tokens=512),
        Workload("f", "random", 2, 8, 4096, 128),
        Workload("g", "shared-prefixes", 16, 64, 179, 256, prefix_tokens=77),
        Workload("s", "chat", 8, 48, 200, 190),
    )
}
"""Workloads by name: a single sequence, two sizes of batches, long prompts, shared prefixes, very
long prompts, long answers after a short shared prefix, chats."""


def choose_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads with these names. Raises ConfigError if a name is unknown."""
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise ConfigError(
            f"unknown workloads {', '.join(unknown) or '(none)'}; known: {', '.join(WORKLOADS)}"
        )
    return tuple(WORKLOADS[name] for name in dict.fromkeys(names))


def write_chats(path: Path, count: int, seed: int) -> None:
    """Write prompts and answers as JSON lines. Their lengths are log-normal, like those of
    conversations."""
    dice = random.Random(seed)  # noqa: S311 - lengths and words, no secret
    vocabulary = VOCABULARY.split()
    with path.open("w") as file:
        for _ in range(count):
            words = _length(dice, 4.9, 0.9, 1024)
            answer = _length(dice, 5.0, 0.7, 512)
            prompt = " ".join(dice.choice(vocabulary) for _ in range(words))
            file.write(json.dumps({"prompt": prompt, "output_tokens": answer}) + "\n")


def _length(dice: random.Random, mean: float, deviation: float, most: int) -> int:
    return min(most, max(8, int(dice.lognormvariate(mean, deviation))))
