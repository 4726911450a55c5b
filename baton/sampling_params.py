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
"""Fields that hold a single value. Each has the same name here, in gRPC and in HTTP."""

OPTIONAL_FIELDS = ("logprobs", "prompt_logprobs")
"""Fields for which None is a valid final value: the client did not set them."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one sequence. The router checks their ranges."""

    temperature: float = 1.0
    """Logits are divided by the temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Sampling keeps the smallest set of tokens whose total probability reaches this value."""
    top_k: int = 0
    """Number of most likely tokens that sampling keeps; 0 keeps all."""
    min_p: float = 0.0
    """Sampling keeps tokens that are at least this fraction as likely as the most likely token."""
    seed: int = 0
    """Seed of 64 bits. The same seed gives the same tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings: texts that end the answer. The router searches for them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer when they are sampled."""
    max_tokens: int = 16
    """Maximum number of tokens to generate."""
    min_tokens: int = 0
    """Number of tokens before which no end of sequence, stop token or stop string ends the
    answer."""
    ignore_eos: bool = False
    """Whether generation continues after the model's end-of-sequence token."""
    presence_penalty: float = 0.0
    """Value that is subtracted once from the logit of each token that was already generated."""
    frequency_penalty: float = 0.0
    """Value that is subtracted from a token's logit once for each time that the token was already
    generated."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative logits, of tokens that the prompt or the
    output already contains."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    """Pairs of a token id and the value that is added to its logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled, including those that end the answer; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output never contains, each with at least one token. The last
    token of a sequence is not sampled directly after the other ones."""
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
