"""Tests whether the time to the first token reveals other tenants' prompts to a tenant.

python -m loadtest.research.timings.tenant_timing --http 127.0.0.1:8000 --own KEY --other KEY

For each new prompt, a random bit decides whether the first tenant sends it. Then the other tenant
sends it, and last the first tenant again, each time alone. The area under the ROC curve shows how
well times separate the two kinds of prompts: 1 always, 0.5 never (J. A. Hanley and B. J. McNeil,
"The meaning and use of the area under a receiver operating characteristic curve", Radiology 143,
1982). Shuffled labels give the probability that chance separates them as well.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence

import httpx

_WORDS = ("north", "river", "stone", "cloud", "seven", "paper", "green", "metal", "quiet", "light")
_SHUFFLES = 2000
_DEADLINE_S = 60.0


def area(quick: Sequence[float], slow: Sequence[float]) -> float:
    """Return the area under the ROC curve: the share of pairs, one time from each list, in which
    the time from ``quick`` is smaller. Equal times count half.
    """
    wins = sum((a < b) + 0.5 * (a == b) for a in quick for b in slow)
    return wins / (len(quick) * len(slow))


def chance(quick: Sequence[float], slow: Sequence[float], dice: random.Random) -> float:
    """Return the probability of a result at least as clear by chance. It is the share of random
    relabelings that separate the times as well or better, in either direction.
    """
    seen = abs(area(quick, slow) - 0.5)
    both, count = [*quick, *slow], 0
    for _ in range(_SHUFFLES):
        dice.shuffle(both)
        count += abs(area(both[: len(quick)], both[len(quick) :]) - 0.5) >= seen
    return (count + 1) / (_SHUFFLES + 1)


class Asker:
    """One connection to a router, over which prompts are sent."""

    def __init__(self, http: str, model: str) -> None:
        self._url = f"http://{http}/v1/completions"
        self._model = model
        self._client = httpx.Client(trust_env=False, timeout=_DEADLINE_S)

    def first_token_s(self, key: str, prompt: str) -> float:
        """Send a prompt with a tenant's key. Return the seconds until the first event of the
        answer.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {key}"}
        began = time.perf_counter()
        with self._client.stream("POST", self._url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            lines = answer.iter_lines()
            next(line for line in lines if line)
            took = time.perf_counter() - began
            for _ in lines:
                pass
        return took


def main() -> None:
    """Run the test, and print the result as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.research.timings.tenant_timing")
    parser.add_argument("--http", default="127.0.0.1:8000", help="host:port of a router.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--own", required=True, help="Key of the tenant that sends first.")
    parser.add_argument("--other", required=True, help="Key of another tenant.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--words", type=int, default=400, help="Of a prompt.")
    given = parser.parse_args()
    dice = random.Random(1)  # noqa: S311
    asker = Asker(given.http, given.model)
    times: dict[tuple[str, bool], list[float]] = {
        (who, asked): [] for who in ("own", "other") for asked in (True, False)
    }
    for number in range(-5, given.rounds):
        prompt = f"{number} " + " ".join(dice.choice(_WORDS) for _ in range(given.words))
        asked = dice.random() < 0.5
        if asked:
            asker.first_token_s(given.own, prompt)
        other = asker.first_token_s(given.other, prompt)
        own = asker.first_token_s(given.own, prompt)
        if number >= 0:
            times["other", asked].append(other)
            times["own", asked].append(own)
    told = {}
    for who in ("own", "other"):
        hits, misses = times[who, True], times[who, False]
        told[who] = {
            "asked_before": len(hits),
            "median_ms_asked": round(sorted(hits)[len(hits) // 2] * 1e3, 2),
            "median_ms_not": round(sorted(misses)[len(misses) // 2] * 1e3, 2),
            "area": round(area(hits, misses), 3),
            "by_chance": round(chance(hits, misses, dice), 4),
        }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
