"""How tokens are drawn from the logits."""

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
"""The fields of one value each, by the name that they have everywhere: here, in gRPC, in HTTP."""

OPTIONAL_FIELDS = ("logprobs", "prompt_logprobs")
"""Those that may be absent to the end, as None."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one sequence; the ranges are checked at the router's edge."""

    temperature: float = 1.0
    """Logits are divided by this; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    seed: int = 0
    """64 bits; same seed, same tokens."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; looked for by the router."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer."""
    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was already generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other token is drawn, not even one that ends the answer; empty: all are allowed."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output never has: the last token of one, of which each has at least
    one, is not drawn behind the others."""
    grammar: Grammar | None = None
    """What the answer's text must match. It goes before ``min_tokens`` and ``ignore_eos``: where it
    allows nothing but the end, the answer ends."""
    logprobs: int | None = None
    """Tell each token's log probability, and those of so many of the likeliest; None: of none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, from the second on."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def ends_at_eos(self) -> bool:
        """Whether the model's end-of-sequence token ends the answer, once it is drawn."""
        return not self.ignore_eos or self.grammar is not None
