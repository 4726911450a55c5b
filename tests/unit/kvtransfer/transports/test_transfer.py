"""One transfer: which side may end it when, and which is notified."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.errors import ChecksumMismatch, WorkerFailed
from kvtransfer.transports.transfer import Transfer

DEADLINE_S = 20.0


class TransferMachine(RuleBasedStateMachine):
    """A transport that places bytes now and then, and others that end it at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.transfer = Transfer()
        self.told: list[Transfer] = []
        self.transfer.when_over(self.told.append)
        self.placing = False
        self.wanted: type[BaseException] | None = None
        self.ended: type[BaseException] | str = ""

    def end(self, how: type[BaseException] | str) -> None:
        """The first end counts."""
        self.placing = False
        self.ended = self.ended or how

    @rule()
    def begin(self) -> None:
        assert self.transfer.begin() is not bool(self.ended)
        self.placing = not self.ended

    @rule()
    def pause(self) -> None:
        self.transfer.pause()
        if self.placing and self.wanted:
            self.end(self.wanted)
        self.placing = False

    @rule()
    def finish(self) -> None:
        self.transfer.finish()
        self.end(self.wanted or "done")

    @rule()
    def fail(self) -> None:
        self.transfer.fail(ChecksumMismatch("damaged"))
        self.end(ChecksumMismatch)

    @rule(cancel=st.booleans())
    def give_up(self, cancel: bool) -> None:
        if cancel:
            self.transfer.cancel()
        else:
            self.transfer.give_up(WorkerFailed("closed"))
        error: type[BaseException] = CancelledError if cancel else WorkerFailed
        if self.placing:
            self.wanted = self.wanted or error
        else:
            self.end(error)

    @invariant()
    def report(self) -> None:
        """Over is never said while bytes are being placed."""
        assert self.told == ([self.transfer] if self.ended else [])
        if isinstance(self.ended, str):
            assert self.transfer.poll() is (self.ended == "done")
            return
        for ask in (self.transfer.poll, lambda: self.transfer.wait(0.0)):
            with pytest.raises(self.ended):
                ask()


TestTransfer = TransferMachine.TestCase
TestTransfer.settings = settings(
    max_examples=200, stateful_step_count=12, deadline=None, derandomize=True
)


def test_waiting_ends_with_it() -> None:
    transfer = Transfer()
    with pytest.raises(TimeoutError, match=r"after 0.01 s"):
        transfer.wait(0.01)
    ending = threading.Timer(0.02, transfer.finish)
    ending.start()
    transfer.wait(DEADLINE_S)
    ending.join(DEADLINE_S)


def test_a_late_waiter_gets_the_result_at_once() -> None:
    transfer = Transfer()
    transfer.finish()
    told: list[Transfer] = []
    transfer.when_over(told.append)
    assert told == [transfer]


def test_a_notified_listener_may_ask_again() -> None:
    transfer = Transfer()
    seen: list[bool] = []
    transfer.when_over(lambda over: over.when_over(lambda again: seen.append(again.poll())))
    transfer.finish()
    assert seen == [True]


def test_it_ends_once_however_many_threads_give_it_up() -> None:
    for _ in range(50):
        transfer = Transfer()
        told: list[Transfer] = []
        transfer.when_over(told.append)
        together = threading.Barrier(4)

        def race(transfer: Transfer = transfer, together: threading.Barrier = together) -> None:
            together.wait(DEADLINE_S)
            transfer.cancel()

        threads = [threading.Thread(target=race) for _ in range(3)]
        for thread in threads:
            thread.start()
        together.wait(DEADLINE_S)
        if transfer.begin():
            assert told == []
            transfer.pause()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert told == [transfer]


def test_who_keeps_a_transfer_that_has_ended_leaves_no_cycle() -> None:
    """Of its error it has no frames, which would have the transfer."""
    errors: list[BaseException | None] = []
    for end in (Transfer.finish, Transfer.cancel, lambda one: one.fail(WorkerFailed("it died"))):
        transfer = Transfer()
        transfer.when_over(lambda over: errors.append(over.error))
        assert transfer.error is None
        end(transfer)
    assert [type(error) for error in errors] == [type(None), CancelledError, WorkerFailed]
    assert all(error is None or error.__traceback__ is None for error in errors)
