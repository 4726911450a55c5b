"""Parameters of sampling tokens from logits."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.grammar import Grammar

SCALAR_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of one value each, whose name is the same here, in gRPC and in HTTP."""

OPTIONAL_FIELDS = ("logprobs", "prompt_logprobs")
"""Fields for which None is a valid final value: the client did not set them."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one sequence. The router checks their ranges."""

    temperature: float = 1.0
    """Logits are divided by the temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose total probability reaches this."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: int = 0
    """Seed of 64 bits. The same seed gives the same tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer. The router searches for it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer."""
    max_tokens: int = 16
    """Maximum number of tokens to generate."""
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many tokens."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the token was already generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    """Pairs of a token id and the value that is added to its logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled, including those that end the answer; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output never contains, each of at least one token. The last token of
    a run is not sampled after the others."""
    grammar: Grammar | None = None
    """Grammar that the answer's text must match. It takes precedence over ``min_tokens`` and
    ``ignore_eos``: where it allows only the end, the answer ends."""
    logprobs: int | None = None
    """Number of most likely tokens to return with each token's log probability; None: no log
    probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return with the log probability of each prompt token, from
    the second on; None: no log probabilities."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def ends_at_eos(self) -> bool:
        """Whether the model's end-of-sequence token ends the answer when it is sampled."""
        return not self.ignore_eos or self.grammar is not None
