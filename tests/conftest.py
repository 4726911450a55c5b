"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from tests.support.expected_skips import read_expected, reason_of, wrong_skips

# Without a Ray, calls of Ray fail; by itself Ray would start a cluster in
# the process of the tests, and leave it there.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# A job in the background ignores SIGINT, and so would all that it starts: Ctrl-C would end nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """See tests/support/expected_skips.py."""
    parser.addoption("--expect-skips", metavar="RUN", help="fail where others skip than expected")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: no later search for garbage, of a second each, looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """At its end the interpreter clears up all there is, or triton reports what it leaves."""
    gc.unfreeze()
    run = session.config.getoption("expect_skips")
    # A worker of xdist reports to the process that has started it.
    if run is None or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    reasons = [reason_of(report) for report in reporter.stats.get("skipped", ())]
    for wrong in wrong_skips(reasons, read_expected(run)):
        reporter.write_line(f"tests/expected_skips.toml: {wrong}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
