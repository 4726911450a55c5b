"""Workers leave as on a pod's termination, and pools grow and shrink."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.launcher.part_watch import SUPERVISOR
from tests.support.e2e.cluster import BATON, START_S, UpProcess
from tests.support.e2e.rolling_restart import CLIENTS, DEADLINE_S, Load, answer, until
from tests.support.e2e.supervision import pid_of, status_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DRAIN_S = 300.0


@contextmanager
def loaded(up: UpProcess) -> Iterator[Load]:
    """Clients ask all the while; no request may be refused, and every answer must be right."""
    load = Load(up, [answer(up, number) for number in range(4)])
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(load.run, first) for first in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop.set()
        for client in running:
            client.result(DEADLINE_S)
    assert load.failed == []
    assert load.wrong == []


def goes_on(load: Load) -> None:
    count = load.answered
    until(lambda: load.answered >= count + CLIENTS, "no answers come")


def scale(up: UpProcess, pool: str, count: int) -> str:
    done = subprocess.run(
        [BATON, "scale", pool, str(count), "--yes", "--http", up.state.http],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def slot_states(up: UpProcess) -> dict[str, str]:
    """By the page of the whole cluster."""
    page = httpx.get(f"{up.http}/metrics/cluster", timeout=DEADLINE_S, trust_env=False).text
    return {
        sample.labels["worker"]: sample.labels["state"]
        for family in text_string_to_metric_families(page)
        if family.name == "baton_worker_slot_state"
        for sample in family.samples
        if sample.value
    }


def obituaries(up: UpProcess) -> list[str]:
    """What the launcher has said of deaths; Ray says as much of every end."""
    return [line for line in up.output if re.match(r"(prefill|decode)-\d (died|keeps)", line)]


def leaves(up: UpProcess, slot: str) -> None:
    """By SIGTERM, and another one takes its place."""
    process = psutil.Process(up.state.processes[slot])
    process.terminate()
    up.wait_for(f"{slot} is back")
    assert not process.is_running()
    assert f"worker {slot} was drained" in (up.logs / f"{slot}.log").read_text()


def test_pools_grow_and_shrink_and_workers_leave_on_sigterm_unnoticed() -> None:
    with UpProcess("--decode", "2", "--deterministic") as up:
        up.wait_ready()
        supervisor = pid_of(up, SUPERVISOR)
        with loaded(up) as load:
            assert "it had 2" in scale(up, "decode", 3)
            up.wait_for("decode-2 has joined")
            goes_on(load)
            leaves(up, "decode-0")
            leaves(up, "prefill-0")
            goes_on(load)
            # The added worker does not depend on the process that added it.
            os.kill(supervisor, signal.SIGKILL)
            up.wait_for("the supervisor was restarted")
            goes_on(load)
            until(
                lambda: set(slot_states(up)) == {"prefill-0", "decode-0", "decode-1", "decode-2"},
                "the slots are not shown",
            )
            assert "it had 3" in scale(up, "decode", 1)
            up.wait_for("decode-1 has left")
            until(lambda: "decode-2" not in up.state.processes, "decode-2 does not leave")
            goes_on(load)
        until(
            lambda: slot_states(up) == {"prefill-0": "running", "decode-0": "running"},
            "the slots are not shown",
        )
        assert obituaries(up) == []
        assert "decode-1" not in status_of(up)
        up.terminate()
        assert up.wait() == 0, up.text


def test_a_cluster_without_prefill_workers_gets_one_and_loses_it_unnoticed() -> None:
    # This policy hands prompts to any prefill worker, also on the decode worker's cores.
    with UpProcess("--prefill", "0", "--policy", "round_robin", "--deterministic") as up:
        up.wait_ready()
        until(lambda: slot_states(up) == {"decode-0": "running"}, "the slots are not shown")
        with loaded(up) as load:
            goes_on(load)
            assert "it had 0" in scale(up, "prefill", 1)
            up.wait_for("prefill-0 has joined")
            until(lambda: routed(up, "remote") > 0, "no prompt is handed off")
            goes_on(load)
            assert "it had 1" in scale(up, "prefill", 0)
            up.wait_for("prefill-0 has left")
            goes_on(load)
        until(lambda: slot_states(up) == {"decode-0": "running"}, "the slots are not shown")
        assert httpx.get(f"{up.http}/health", trust_env=False).json()["status"] == "ok"
        assert obituaries(up) == []
        up.terminate()
        assert up.wait() == 0, up.text


def routed(up: UpProcess, decision: str) -> float:
    """Prompts that were placed in one way."""
    page = httpx.get(f"{up.http}/metrics", timeout=DEADLINE_S, trust_env=False).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "baton_route_decisions_total" and sample.labels["decision"] == decision
    )


def test_a_second_sigterm_does_not_wait_for_what_runs() -> None:
    env = {"BATON_DRAIN_DEADLINE_S": str(DRAIN_S)}
    with UpProcess("--dtype", "float32", "--quantization", "none", env=env) as up:
        up.wait_ready()
        pid_of(up, SUPERVISOR)
        process = psutil.Process(up.state.processes["decode-0"])
        begun, texts = threading.Event(), []

        def stream() -> None:
            body = {
                "model": up.model,
                "prompt": "The sea at night",
                "max_tokens": 1900,
                "ignore_eos": True,
                "stream": True,
            }
            url = f"{up.http}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=DRAIN_S, trust_env=False) as answered:
                for line in answered.iter_lines():
                    texts.append(line)
                    begun.set()

        client = threading.Thread(target=stream, daemon=True)
        client.start()
        assert begun.wait(START_S)
        process.terminate()
        # `baton status` would say that nothing is left to decode, and end with an error.
        until(
            lambda: slot_states(up).get("decode-0") == "draining", "it is not shown that it leaves"
        )
        process.terminate()
        # Well before the drain's deadline.
        process.wait(START_S)
        up.wait_for("decode-0 is back")
        assert obituaries(up) == []
        # It goes on at the next one, or ends with an error: it does not hang.
        client.join(DRAIN_S)
        assert not client.is_alive()
        assert texts
