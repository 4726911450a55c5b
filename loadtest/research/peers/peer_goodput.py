"""Goodput of Baton and of other servers on this machine: one client, one mix, many SLOs.

    python -m loadtest.research.peers.peer_goodput --model FOLDER --vllm-bin FILE --json FILE

The mix: chats (short prompts, long answers) and documents (1,000 to 2,000 tokens, short answers).
Each server is offered the same requests at rising rates, and every request's times are kept, so
that the goodput under any SLO is known afterwards: the highest rate up to which at least 90 % of
requests met it at every rate (DistServe, Zhong et al., OSDI 2024).

Prompts are random tokens, and each answer has the requested length. With ``--prompts FOLDER``,
prompts are questions and passages from the folder's files, sent as chats, and answers end by
themselves. This is for speculation, which is not comparable on random tokens and on text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from baton.errors import BatonError, ConfigError
from loadtest.common.peer_servers import SERVED_NAME, Programs, Server, make_server, serving
from loadtest.engine.speculation_prompts import read_questions
from loadtest.generator.load_run import LoadRun, Say, run_load
from loadtest.generator.load_settings import (
    LoadSettings,
    PaceSettings,
    RunTraffic,
    ServerSettings,
    TrafficSettings,
    counted,
)
from loadtest.generator.rate_search import ATTAINMENT
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.workload.arrival_process import ArrivalProcess
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import (
    CHARACTERS_PER_TOKEN,
    PlannedRequest,
    Prompt,
    PromptMaker,
)
from loadtest.generator.workload.traffic import Source
from planning.common.report import print_whole, this_machine, whole_table
from planning.common.slo import Slo

_STEP = 1.25
"""Ratio of each tried request rate to the previous one. It determines the precision of the
goodput."""
_HOPELESS = 0.6
"""Minimum share of requests that meet the loosest SLO. If the share at a rate is lower, no higher
rate is tried."""
_WARM_UP_RATE, _WARM_UP_S = 1.0, 8.0
_TIMEOUT_S = 60.0
_SEED = 5
_CHAT = (Lengths.parse("lognormal:100,0.6,400"), Lengths.parse("lognormal:160,0.5,400"))
_DOCUMENT = (Lengths.parse("uniform:1000-2000"), Lengths.parse("uniform:16-48"))
_PASSAGES = "rag"
TTFTS_S = (1.0, 2.0, 4.0)
TPOTS_S = (0.02, 0.03, 0.05, 0.1)
SLOS = tuple(Slo(ttft_s=ttft, tpot_s=tpot) for ttft in TTFTS_S for tpot in TPOTS_S)


@dataclass(frozen=True, slots=True)
class Texts:
    """Questions and passages that were read from the folder of ``--prompts``."""

    questions: tuple[str, ...]
    passages: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Texts:
        """Read questions and passages from a folder. Passages are those of category ``rag``.

        Raises ConfigError if there are no questions, or no passages.
        """
        found = read_questions(folder)
        passages = found.pop(_PASSAGES, [])
        questions = [text for texts in found.values() for text in texts]
        if not passages or not questions:
            raise ConfigError(f"{folder} needs rows of category {_PASSAGES!r} and rows of others")
        return cls(tuple(questions), tuple(passages))

    def document(self, tokens: int, generator: np.random.Generator) -> str:
        """Return a document of about ``tokens`` tokens: passages in random order, and an
        instruction.
        """
        order = generator.permutation(len(self.passages))
        text = "\n\n".join(self.passages[number] for number in order)
        return f"{text[: tokens * CHARACTERS_PER_TOKEN]}\n\nSummarize the text above."


class Mix(Source):
    """Makes chats and documents in random order. Lengths depend on the seed, texts on the seed and
    the run.
    """

    def __init__(self, documents: float, seed: int, run: int, texts: Texts | None = None) -> None:
        """``documents`` is the share of documents among the requests. If ``texts`` is None, prompts
        are random tokens.
        """
        self._documents = documents
        self._seed = seed
        self._run = run
        self._texts = texts
        self._maker = PromptMaker("tokens", seed, run)

    @property
    def has_texts(self) -> bool:
        """Whether prompts are text, and answers end by themselves."""
        return self._texts is not None

    def request(self, number: int, due_s: float) -> PlannedRequest:
        """Implement ``Source``. For texts, a document's ``input_tokens`` is approximate."""
        generator = np.random.default_rng((self._seed, number))
        is_document = generator.random() < self._documents
        kind = _DOCUMENT if is_document else _CHAT
        tokens, answer = (int(lengths.draw(1, generator)[0]) for lengths in kind)
        if self._texts is None:
            prompt: Prompt = self._maker.fresh(number, tokens)
        else:
            drawn = np.random.default_rng((self._seed, number, self._run))
            prompt = (
                self._texts.document(tokens, drawn)
                if is_document
                else self._texts.questions[drawn.integers(len(self._texts.questions))]
            )
        return PlannedRequest(number, due_s, prompt, tokens, answer)


@dataclass(frozen=True, slots=True)
class RateFigures:
    """Figures of one server at one rate."""

    rate: float
    requests: int
    attainment: tuple[float, ...]
    """For each of ``SLOS``, in this order, the share of requests that met it."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    warnings: tuple[str, ...]


def goodput(figures: Sequence[RateFigures], slo: int) -> float:
    """Return the highest rate at which enough requests met ``SLOS[slo]``, if the same holds at
    every lower rate. Return 0 if there is none."""
    met = itertools.takewhile(lambda one: one.attainment[slo] >= ATTAINMENT, figures)
    return max((one.rate for one in met), default=0.0)


def figures_of(run: LoadRun, records: Sequence[RequestRecord]) -> RateFigures:
    """Return the figures of one run. ``records`` are those requests of the run that count."""
    found = run.summary.all
    shares = tuple(
        sum(record.met(slo) for record in records) / max(1, len(records)) for slo in SLOS
    )
    return RateFigures(
        run.rate or 0.0,
        len(records),
        shares,
        ttft_p50_ms=round(found.ttft.p50_ms, 1),
        ttft_p95_ms=round(found.ttft.p95_ms, 1),
        tpot_p50_ms=round(found.tpot.p50_ms, 1),
        tpot_p95_ms=round(found.tpot.p95_ms, 1),
        warnings=run.warnings,
    )


def rates(first: float) -> Iterator[float]:
    """Yield rising rates, each a quarter above the one before."""
    return (round(first * _STEP**step, 2) for step in itertools.count())


def drive(server: Server, rate: float, seconds: float, mix: Mix, say: Say) -> RateFigures:
    """Send the mix to a server at ``rate`` for ``seconds``, and return the figures. Raises
    BatonError.
    """
    pace = PaceSettings(rate=rate, seconds=seconds)
    settings = LoadSettings(
        ServerSettings(
            url=server.base_url,
            endpoint="chat" if mix.has_texts else "completions",
            model=SERVED_NAME,
            ignore_eos=not mix.has_texts,
            timeout_s=_TIMEOUT_S,
        ),
        TrafficSettings(seed=_SEED),
        pace,
    )
    times = ArrivalProcess("poisson", rate).times(seconds, np.random.default_rng(_SEED)).tolist()
    traffic = RunTraffic(mix, tuple(times), seconds)
    done = uvloop.run(run_load(settings, traffic, Console(stderr=True), say))
    window = counted(pace, seconds)
    return figures_of(done, [record for record in done.records if window.holds(record)])


def sweep(
    server: Server,
    rising: Iterable[float],
    seconds: float,
    documents: float,
    texts: Texts | None,
    say: Say,
) -> tuple[RateFigures, ...]:
    """Measure a server at rising request rates, until too few requests meet even the loosest SLO.
    Raises BatonError."""
    drive(server, _WARM_UP_RATE, _WARM_UP_S, Mix(documents, _SEED, 0, texts), say)
    found: list[RateFigures] = []
    for number, rate in enumerate(rising, start=1):
        found.append(drive(server, rate, seconds, Mix(documents, _SEED, number, texts), say))
        say(f"{server.title}: {found[-1]}")
        if max(found[-1].attainment) < _HOPELESS:
            break
    return tuple(found)


def show(found: Mapping[str, Sequence[RateFigures]], console: Console) -> None:
    """Print the goodput in requests/s for each SLO. Also print the first server's goodput divided
    by that of each other server."""
    names = list(found)
    ours, others = names[0], names[1:]
    ratios = [f"{ours} / {name}" for name in others]
    table = whole_table("SLO", *names, *ratios, title="Highest rate that 90 % met, requests/s")
    for number, slo in enumerate(SLOS):
        best = {name: goodput(figures, number) for name, figures in found.items()}
        least = {name: figures[0].rate if figures else math.inf for name, figures in found.items()}
        table.add_row(
            slo.text(),
            *(f"{rate:.2f}" if rate else f"below {least[name]:.2f}" for name, rate in best.items()),
            *(_ratio(best[ours], best[name], least[name]) for name in others),
        )
    print_whole(console, table)


def _ratio(ours: float, other: float, least: float) -> str:
    """Return the first server's goodput divided by another server's, as text. It is empty if the
    first server met the SLO at no rate.

    ``least`` is the lowest rate at which the other server was tried.
    """
    if not ours:
        return ""
    return f"{ours / other:.2f}×" if other else f"above {ours / least:.2f}×"


def rates_in(text: str) -> tuple[float, ...]:
    """Parse the rates of a command-line option. Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (0.0,)
    if list(found) != sorted(set(found)) or not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of rising rates above 0, as in 0.25,0.5,1"
        )
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.research.peers.peer_goodput", description=__doc__
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--vllm-bin", type=Path, help="vLLM's command")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, in bf16")
    parser.add_argument(
        "--peers", default="baton,vllm", help="servers to drive; ratios are relative to the first"
    )
    parser.add_argument("--baton-args", default="", help="more options of `baton serve`")
    parser.add_argument("--prompts", type=Path, help="a folder of questions and passages")
    parser.add_argument(
        "--documents", type=float, default=0.5, help=("share of documents in the requests")
    )
    parser.add_argument("--first-rate", type=float, default=0.5, help="requests/s")
    parser.add_argument(
        "--rates", type=rates_in, default=(), help="rates to use instead: 0.25,0.5,1, rising"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each rate")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    asked = parser.parse_args(arguments)
    programs = Programs(
        asked.model,
        vllm=asked.vllm_bin,
        llama_server=asked.llama_server,
        gguf=asked.gguf,
        baton_arguments=asked.baton_args,
    )
    found: dict[str, tuple[RateFigures, ...]] = {}
    console = Console()
    try:
        texts = Texts.read(asked.prompts) if asked.prompts else None
        with tempfile.TemporaryDirectory() as folder:
            for name in asked.peers.split(","):
                server = make_server(name, programs)
                with serving(server, Path(folder) / f"{name}.log"):
                    rising = asked.rates or rates(asked.first_rate)
                    found[name] = sweep(
                        server, rising, asked.seconds, asked.documents, texts, console.print
                    )
    except BatonError as error:
        console.print(f"error: {error.message}", style="red")
        return 1
    finally:
        machine = asdict(this_machine())
        rows = {name: [asdict(one) for one in figures] for name, figures in found.items()}
        slos = [slo.bounds() for slo in SLOS]
        asked.json.write_text(json.dumps({"machine": machine, "slos": slos, "servers": rows}))
        if found:
            show(found, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
