"""The cost of a request's tokens, in whole nanodollars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from baton.config.choices import BACKGROUND_CLASS
from baton.config.cluster import Config
from baton.config.money import PricesConfig
from router.core.request import Choice, GenerationRequest


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices of single tokens, in nanodollars."""

    input: int
    cached_input: int
    output: int

    @classmethod
    def of(cls, prices: PricesConfig) -> TokenPrices:
        """Convert prices: a dollar per million tokens is 1000 nanodollars per token."""
        cached = prices.input if prices.cached_input is None else prices.cached_input
        return cls(*(round(1000 * price) for price in (prices.input, cached, prices.output)))


@dataclass(frozen=True, slots=True)
class BillLine:
    """A line of a bill: tokens of one class of requests, and the cost of these tokens."""

    context_class: str
    input_tokens: int
    """Number of prompt tokens, cached ones included."""
    cached_tokens: int
    output_tokens: int
    prices: TokenPrices

    @property
    def costs(self) -> tuple[int, int, int]:
        """Cost in nanodollars of the computed prompt tokens, the cached prompt tokens, and the
        output tokens."""
        prices = self.prices
        computed = self.input_tokens - self.cached_tokens
        return (
            computed * prices.input,
            self.cached_tokens * prices.cached_input,
            self.output_tokens * prices.output,
        )

    @property
    def cost(self) -> int:
        """Cost of the line in nanodollars."""
        return sum(self.costs)


class PriceTable:
    """The token prices of each class: of the context-length classes, and of background requests."""

    def __init__(self, config: Config) -> None:
        self._class_of: Callable[[int], str] = config.class_of
        self._usual = TokenPrices.of(config.prices)
        self._own = {one.name: TokenPrices.of(one) for one in config.class_prices}

    @property
    def any(self) -> bool:
        """Whether any token of any class has a price."""
        return any(one != TokenPrices(0, 0, 0) for one in (self._usual, *self._own.values()))

    def class_of(self, request: GenerationRequest) -> str:
        """Return the class by whose prices a request is billed: the class of background work, or
        the request's context-length class."""
        if request.background:
            return BACKGROUND_CLASS
        return self._class_of(len(request.prompt_ids))

    def line(
        self, context_class: str, input_tokens: int, cached_tokens: int, output_tokens: int
    ) -> BillLine:
        """Build a line of a bill. If ``cached_tokens`` exceeds the prompt's tokens, all of them
        count as cached."""
        prices = self._own.get(context_class, self._usual)
        cached = min(cached_tokens, input_tokens)
        return BillLine(context_class, input_tokens, cached, output_tokens, prices)

    def max_cost(self, requests: Sequence[GenerationRequest]) -> int:
        """Return the maximum cost of requests in nanodollars: prompt tokens at the higher of their
        two prices, and every answer at its maximum length."""
        total = 0
        for request in requests:
            prices = self._own.get(self.class_of(request), self._usual)
            prompt = len(request.prompt_ids) * max(prices.input, prices.cached_input)
            answers = 0 if request.embeds else request.choices * request.sampling.max_tokens
            total += prompt + answers * prices.output
        return total

    def lines(
        self, requests: Sequence[GenerationRequest], choices: Sequence[Choice]
    ) -> Iterator[BillLine]:
        """Yield the bill's line for each prompt of a request, from the choices that its client's
        usage counts."""
        left = iter(choices)
        for request in requests:
            own = list(islice(left, request.choices))
            if not any(choice.begun for choice in own):
                continue
            yield self.line(
                self.class_of(request),
                sum(choice.prompt_tokens for choice in own),
                sum(choice.cached_tokens for choice in own),
                sum(choice.completion_tokens for choice in own),
            )
