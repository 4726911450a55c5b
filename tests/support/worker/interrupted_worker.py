"""A worker's engine core, scheduler and runner, where any call of theirs may raise.

The model is made up: a token's KV is a hash of all tokens up to it, read from the blocks, and the
logits are a function of the KV. So wrong, stale or foreign KV gives other tokens.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import baton.grammars.compiled_grammars
import baton.hashing
import engine.engine
import tests.support.fake_grammars
from baton.errors import BatonError
from baton.grammar import Grammar, GrammarKind
from baton.hashing import hash_key
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.execution.runner import Ending, ModelRunner
from engine.gpu.runner import GpuRunner
from engine.gpu.speculation import make_overlap_speculation
from engine.sampling.sampling import sample
from engine.sampling.step import StepInput, StepOutput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tier import BlockTier
from engine.scheduling.block_tiers import BlockTiers
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceUpdate
from engine.speculation.speculation import NgramDrafter, Speculation
from tests.kernels.gpu.torch_steps import TorchSteps
from tests.support.engine.drafters import WholeDrafts
from tests.support.fake_grammars import FakeMatcher
from worker.core.engine_core import EngineCore
from worker.core.step_planner import StepPlanner

SIZE = 4
VOCAB = 13
CONTEXT = 40
KEY = hash_key("model")
CPU = torch.device("cpu")
BEAT_TURNS = 3
_TOKENS = np.arange(1, VOCAB + 1, dtype=np.uint64)


class MadeUpModel:
    """Implements ``engine.sampling.step.StepModel``, and copies blocks."""

    layers_done = 0

    def __init__(self, blocks: int) -> None:
        self.memory = [[0] * SIZE for _ in range(blocks)]

    def clear_progress(self) -> None:
        """Nothing to do."""

    def use_threads(self, threads: int) -> None:
        """Nothing to do."""

    def run(self, step: StepInput) -> StepOutput:
        kv: list[int] = []
        for row in step.rows:
            before = row.start - 1
            state = self.memory[row.block_table[before // SIZE]][before % SIZE] if row.start else 0
            for position in range(row.start, row.start + row.count):
                state = zlib.crc32(bytes([step.token_ids[len(kv)]]), state)
                self.memory[row.block_table[position // SIZE]][position % SIZE] = state
                kv.append(state)
        logits = torch.zeros(len(step.outputs), VOCAB)
        for number, place in enumerate(step.outputs):
            logits[number] = torch.from_numpy(_logits(kv[place]))
        return StepOutput(logits.argmax(1).tolist() if step.greedy else None, logits)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for source, target in pairs:
            self.memory[target] = list(self.memory[source])


def _logits(kv: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    mixed = (_TOKENS * np.uint64(kv * 2 + 1) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return (mixed % np.uint64(10007)).astype(np.float32) / np.float32(100)


_COUNTED = Path(engine.engine.__file__).parent
_ALSO = {
    module.__file__
    for module in (baton.grammars.compiled_grammars, baton.hashing, tests.support.fake_grammars)
}
_PLANNING = {Scheduler.schedule.__code__, Scheduler.expire.__code__}
_MODEL = {MadeUpModel.run.__code__, MadeUpModel.copy.__code__}


class Faults:
    """Counts the calls of the engine's functions, and raises at some of them."""

    def __init__(self, at: tuple[int, ...] = (), error: type[Exception] = MemoryError) -> None:
        """``at``: which calls raise, from 0."""
        self.at = frozenset(at)
        self.calls: list[CodeType] = []
        self.raised: list[str] = []
        """What raised."""
        self.on_raise: Callable[[FrameType], None] = lambda frame: None
        self.are_over = False
        self._error = error
        self._ours: dict[CodeType, bool] = {}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Calls count, and may raise."""
        sys.setprofile(None if self.are_over else self._hear)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._is_ours(frame.f_code):
            return
        self.calls.append(frame.f_code)
        if len(self.calls) - 1 in self.at:
            self.raised.append(frame.f_code.co_qualname)
            self.on_raise(frame)
            # Python takes the profile away, until it is armed again.
            raise self._error(f"injected into {frame.f_code.co_qualname}")

    def _is_ours(self, code: CodeType) -> bool:
        if code not in self._ours:
            path = code.co_filename
            inside = Path(path).is_relative_to(_COUNTED) or path in _ALSO or code in _MODEL
            # A generator would be resumed, and have to be closed.
            self._ours[code] = inside and not code.co_flags & inspect.CO_GENERATOR
        return self._ours[code]


@dataclass(frozen=True)
class Job:
    """A request that comes at a turn, and may be aborted at another."""

    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    choices: int = 1
    grammar: bool = False
    seed: int | None = None
    hand_back: bool = False
    aborted: int | None = None

    @property
    def spec(self) -> SequenceSpec:
        sampling = SamplingParams(
            temperature=0.0 if self.seed is None and self.choices == 1 else 1.0,
            seed=self.seed or 0,
            max_tokens=self.max_tokens,
            grammar=Grammar(GrammarKind.REGEX, "any") if self.grammar else None,
        )
        return SequenceSpec(
            "",
            0,
            "",
            self.prompt,
            len(self.prompt),
            sampling,
            choices=self.choices,
            hand_back=self.hand_back,
        )


@dataclass(frozen=True)
class History:
    """Requests, and what they meet."""

    jobs: tuple[Job, ...]
    blocks: int = 64
    max_sequences: int = 4
    chunk_tokens: int = 16
    drafts: bool = False
    tiers: bool = False
    overlaps: bool = False
    """Whether the runner is a GPU's."""


@dataclass(eq=False)
class Answer:
    """What became of a request's choice."""

    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """``done``, ``lost``, ``aborted`` or ``handed back``."""


class Tiers:
    """Copies blocks of the pool ahead of their eviction, at once."""

    def __init__(self, pool: BlockPool, model: MadeUpModel, slots: int) -> None:
        self.tiers = BlockTiers(pool, [BlockTier("host", slots)])
        self._model = model
        self._slots: dict[int, list[int]] = {}
        self.loader = SimpleNamespace(returns_sooner=lambda sequence: False)

    def before_schedule(self, schedule: Callable[[], None]) -> None:
        """Nothing comes back for preempted sequences."""

    def after_schedule(self) -> None:
        while self.tiers.wants_spill and (spill := self.tiers.next_spill()) is not None:
            self._slots[spill.copy.slot] = list(self._model.memory[spill.place])
            self.tiers.end_spill(spill)

    def counts(self) -> Mapping[str, int]:
        return {}

    def load(self, sequence: Sequence) -> list[int]:
        """The leading blocks of a new sequence, pinned, those of the tier brought back."""
        pool = self.tiers.pool
        hashes = sequence.full_hashes(SIZE)[: (len(sequence.token_ids) - 1) // SIZE]
        run = self.tiers.find(hashes)
        missing = [found for found in run if found.copy is not None]
        if not missing or len(missing) > pool.available:
            return []
        self.tiers.begin_load(run)
        for found in missing:
            if pool.holder(found.digest) is None and found.copy is not None:
                (block,) = pool.allocate(1)
                self._model.memory[block] = list(self._slots[found.copy.slot])
                pool.register(block, found.digest, found.copy.leading)
                pool.release([block])
        self.tiers.end_load(run)
        blocks = pool.match(hashes)
        pool.pin(blocks)
        return blocks


class _Gauges:
    """Show nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class World:
    """Runs a history. Listens to the engine core as a role does."""

    def __init__(self, history: History, faults: Faults) -> None:
        """Call it on an event loop."""
        self.history = history
        self.faults = faults
        faults.on_raise = self._note_fault
        self.model = MadeUpModel(history.blocks)
        self.pool = BlockPool(history.blocks)
        limits = SchedulerLimits(
            SIZE,
            history.chunk_tokens,
            history.max_sequences,
            CONTEXT,
            draft_tokens=4 if history.drafts else 0,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.tiers = Tiers(self.pool, self.model, 2 * history.blocks) if history.tiers else None
        self.runner = self._make_runner()
        self.reasons: list[str] = []
        self.plans: list[StepPlan] = []
        self.started: list[tuple[StepPlan, Ending | Exception]] = []
        self.core = self._make_core()
        self.answers: dict[tuple[int, int], Answer] = {}
        self._keys: dict[Sequence, tuple[int, int]] = {}
        self._choices: dict[int, list[Sequence]] = {}
        self.excused: set[int] = set()
        """Requests of the steps in which calls raised."""
        self._current = 0
        """The step that runs, or whose result is taken in."""

    def _make_runner(self) -> ModelRunner:
        cache: Any = SimpleNamespace(data=torch.zeros(1, 1), copy=self.model.copy)
        if self.history.overlaps:
            steps: Any = TorchSteps(self.model, 64)
            drafts = make_overlap_speculation("ngram") if self.history.drafts else None
            return GpuRunner(steps, cache, CPU, VOCAB, drafts)
        drafting = Speculation(NgramDrafter(), WholeDrafts()) if self.history.drafts else None
        runner = ModelRunner(self.model, cache, CPU, VOCAB, drafting)
        runner._sample = sample
        return runner

    def _make_core(self) -> EngineCore:
        engine: Any = SimpleNamespace(
            scheduler=self.scheduler, pool=self.pool, runner=self.runner, config=None
        )
        gauges: Any = _Gauges()
        tiers: Any = self.tiers
        core = EngineCore(engine, gauges, "w:1", tiers=tiers, fail=self.reasons.append)
        thread: Any = SimpleNamespace(submit=self.plans.append, start=lambda: None)
        core._thread = thread
        core._planner = StepPlanner(self.scheduler, None, is_cpu=not self.history.overlaps)
        core.subscribe(self)
        core.start()
        return core

    # The listener

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            answer = self.answers[self._keys[update.sequence]]
            if answer.end:
                # Another choice of its request was lost in this step.
                assert answer.end == "lost", "an update comes after its end"
                continue
            answer.tokens += update.token_ids
            if update.sequence.finish_reason:
                answer.end = "done"
        self._take_handed_back()

    def _take_handed_back(self) -> None:
        with self.unarmed():
            handed_back = self.scheduler.take_handed_back()
        for sequence in handed_back:
            answer = self.answers[self._keys[sequence]]
            answer.end = answer.end or "handed back"

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        for sequence in sequences:
            self._end(self._keys[sequence][0], "lost")

    def on_expire(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._end(self._keys[sequence][0], "aborted")

    def _end(self, number: int, how: str) -> None:
        """All of a request ends, as roles have it."""
        for sequence in self._choices[number]:
            answer = self.answers[self._keys[sequence]]
            answer.end = answer.end or how
            with self.unarmed():
                self.scheduler.remove(sequence)

    @contextmanager
    def unarmed(self) -> Iterator[None]:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)

    # Running

    def _note_fault(self, frame: FrameType) -> None:
        """Where planning fails, no step has failed."""
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in _PLANNING:
            caller = caller.f_back
        for step, flight in self.scheduler._plans.items():
            # Overlapping steps name their tokens before they end: both end without them.
            if caller is None and (self.history.overlaps or step == self._current):
                self.excused |= {self._keys[sequence][0] for sequence in flight.sequences}

    def add(self, number: int, job: Job) -> None:
        spec = replace(job.spec, request_id=f"r{number}")
        made = [
            Sequence(10 * number + n, spec, stop_ids=(), hash_key=KEY, choice=n)
            for n in range(job.choices)
        ]
        made[0].siblings = tuple(made[1:])
        made[0].follow(FakeMatcher(VOCAB) if job.grammar else None)
        self._choices[number] = made
        for n, sequence in enumerate(made):
            self._keys[sequence] = number, n
            self.answers[(number, n)] = Answer()
        blocks = [] if self.tiers is None else self.tiers.load(made[0])
        self.scheduler.add(made[0], blocks)

    def turn(self) -> None:
        """The engine ends its oldest step; the engine core applies it, and beats."""
        with self.faults.armed():
            self.core.schedule_steps()
        if self.plans:
            plan = self.plans.pop(0)
            self._current = plan.step
            self.started.append((plan, self._begun(plan)))
        overlap = 1 if self.history.overlaps and self.plans else 0
        while len(self.started) > overlap:
            plan, ending = self.started.pop(0)
            self._current = plan.step
            with self.faults.armed():
                self.core._apply(plan, self._ended(ending), 0.0)

    def _begun(self, plan: StepPlan) -> Ending | Exception:
        try:
            with self.faults.armed():
                return self.runner.start(plan)
        except Exception as error:
            return error

    def _ended(self, ending: Ending | Exception) -> StepResult | Exception:
        if isinstance(ending, Exception):
            return ending
        try:
            return ending()
        except Exception as error:
            return error

    def run(self) -> None:
        """All of the history, and then one more request."""
        jobs = self.history.jobs
        for turn in range(400):
            for number, job in enumerate(jobs):
                if job.arrives == turn:
                    self.add(number, job)
                if job.aborted == turn and number in self._choices:
                    self._end(number, "aborted")
            self.turn()
            if turn > max(job.arrives for job in jobs) and self.is_idle:
                break
        self.faults.are_over = True
        last = len(jobs)
        self.add(last, Job(0, (1, 2, 3, 4, 5), 3))
        for _ in range(20):
            self.turn()
        self._take_handed_back()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle() and not self.plans and not self.started

    # Checks

    def check(self, expected: Mapping[tuple[int, int], list[int]]) -> None:
        """``expected``: each choice's tokens without company and without faults."""
        assert not self.reasons or len(self.faults.raised) > 1, "one failure ends no worker"
        assert self.is_idle, "work is left"
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.quarantined == 0, "blocks are lost"
        if self.tiers is not None:
            self.tiers.tiers.check()
        for key, answer in self.answers.items():
            assert answer.end, "a request has no end"
            if answer.end == "done":
                assert answer.tokens == expected[key]
            else:
                assert answer.tokens == expected[key][: len(answer.tokens)]
            if answer.end == "lost":
                assert key[0] in self.excused, "a request of another step is lost"
        last = self.answers[(len(self.history.jobs), 0)]
        assert last.end == "done", "the next request is not served"
        self._check_engine()

    def _check_engine(self) -> None:
        """The engine will drop what it still knows."""
        dropped = set(self.scheduler._dropped)
        assert self.runner._known.keys() <= dropped
        assert self.runner._grammars._states.keys() <= dropped
        speculation: Any = self.runner.speculation
        if speculation is not None:
            assert speculation._drafter._indexes.keys() <= dropped


def run(history: History, faults: Faults) -> World:
    """What became of a history; check it."""

    async def ran() -> World:
        world = World(history, faults)
        world.run()
        return world

    return asyncio.run(ran())


@functools.cache
def undisturbed(history: History) -> dict[tuple[int, int], list[int]]:
    """The tokens of each choice of each request, computed alone in an engine with room."""
    found = {}
    last = Job(0, (1, 2, 3, 4, 5), 3)
    for number, job in enumerate((*history.jobs, last)):
        alone = History((replace(job, arrives=0, aborted=None, hand_back=False),))
        world = run(alone, Faults())
        for n in range(job.choices):
            answer = world.answers[(0, n)]
            assert answer.end == "done"
            found[(number, n)] = answer.tokens
    return found


def calls_of(history: History) -> list[CodeType]:
    """The calls of a history in their order, without faults."""
    faults = Faults()
    run(history, faults).check(undisturbed(history))
    return faults.calls
