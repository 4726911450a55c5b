"""Workers live without their launchers: one that waits takes over, or none does for a while.

Each launcher has a machine of its own, and ends with it: nothing tells the others. Clients ask a
router on another machine all the while.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.e2e.cluster import LEADS_AGAIN, LIVES_ON, WAITS
from tests.support.e2e.network import BATON, END_S, START_S, Network, network, workers_on
from tests.support.machines import Machine

SLOW_S = 20.0
"""How long Ray's control store stands still, in seconds: longer than a launcher's lease."""
AWAY_S = float(os.environ.get("BATON_TEST_AWAY_S", "45"))
"""How long there is no launcher, in seconds."""
LOAD = """
import concurrent.futures, json, os, sys, time, httpx
url, stop = sys.argv[1:]
def body(number):
    return {"model": "model", "prompt": f"{number} upon a time " * 9, "max_tokens": 48,
            "temperature": 0, "ignore_eos": True}
def ask(client, number):
    answer = client.post(url, json=body(number))
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
def run(first):
    done, bad = 0, []
    with httpx.Client(trust_env=False, timeout=150) as client:
        while not os.path.exists(stop):
            number = (first + done) % 4
            try:
                text = ask(client, number)
            except httpx.HTTPError as error:
                text = repr(error)
            done += 1
            time.sleep(0.2)
            if text != expected[number]:
                bad.append(text)
    return done, bad
with httpx.Client(trust_env=False, timeout=150) as client:
    expected = [ask(client, number) for number in range(4)]
print("begun", flush=True)
with concurrent.futures.ThreadPoolExecutor(3) as threads:
    runs = list(threads.map(run, range(3)))
print(json.dumps({"done": sum(done for done, _ in runs), "bad": sum((bad for _, bad in runs), [])}))
"""


class Load:
    """Clients that ask until they are stopped. Each answer must be the one of the beginning."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._stop = net.folder / "stop"
        url = f"http://{net.head.address}:8000/v1/completions"
        self._process = net.start(
            net.head, "load", sys.executable, "-c", LOAD, url, str(self._stop)
        )
        net.until(lambda: "begun" in net.text("load"), "no load")

    def end(self) -> int:
        """Return the number of answers. None may be wrong, and no request may be lost."""
        self._stop.touch()
        assert self._process.wait(START_S) == 0, self._net.text("load")
        seen = json.loads(self._net.text("load").splitlines()[-1])
        assert seen["bad"] == []
        return int(seen["done"])


def launcher(net: Network, machine: Machine, name: str) -> subprocess.Popen[bytes]:
    file = str(net.folder / "baton.toml")
    return net.start(machine, name, BATON, "serve", "--config", file)


def router(net: Network) -> None:
    file = str(net.folder / "baton.toml")
    net.start(net.head, "router", BATON, "router", "--config", file, *net.fronts)


def workers(*machines: Machine) -> set[psutil.Process]:
    return {worker for machine in machines for worker in workers_on(machine)}


@pytest.mark.long
@pytest.mark.timeout(900 + 2 * int(AWAY_S))
def test_workers_outlive_launchers_and_a_store_that_forgets() -> None:
    with network(7, Network) as net:
        leader, standby, third, *nodes = net.others
        net.start_head()
        for machine, name in zip(nodes, ("prefill", "decode-a", "decode-b"), strict=True):
            net.join(machine, name, f"baton_{name.partition('-')[0]}")
        net.configure(decode=2, more=LIVES_ON)
        router(net)
        first = launcher(net, leader, "leader")
        net.until_ready(first, "leader")
        launcher(net, standby, "standby")
        net.until(lambda: WAITS in net.text("standby"), "it does not wait")
        assert "ready in" not in net.text("standby")
        living = workers(*nodes)
        assert len(living) == 3
        load = Load(net)
        # A leader that stood still finds that another one leads, and disturbs nothing.
        leader.suspend(first)
        net.until(lambda: "ready in" in net.text("standby"), "it does not take over")
        leader.resume(first)
        net.until(lambda: WAITS in net.text("leader"), "it does not notice")
        # Its successor's machine is lost, and with it the supervisor, which starts elsewhere.
        standby.power_off()
        began = time.monotonic()
        net.until(lambda: LEADS_AGAIN in net.text("leader"), "it does not lead")
        took_s = time.monotonic() - began
        assert workers(*nodes) == living
        # It heals: a worker that dies is replaced.
        victim = min(workers_on(nodes[1]), key=lambda one: one.pid)
        victim.kill()
        net.until(lambda: " is back" in net.text("leader"), "it is not replaced")
        living = workers(*nodes)
        # Now there is no launcher at all, and meanwhile the store is another, empty one.
        leader.power_off()
        time.sleep(AWAY_S / 2)
        net.restart_store()
        time.sleep(AWAY_S / 2)
        assert workers(*nodes) == living
        # The next launcher takes them over, as they are.
        last = launcher(net, third, "last")
        net.until_ready(last, "last")
        assert workers(*nodes) == living
        answers = load.end()
        assert answers > 0
        told = f"{answers} answers, none lost; takeover in {took_s:.1f} s"
        sys.stdout.write(f"{told}; no launcher for {AWAY_S:.0f} s\n")
        # SIGTERM leaves the workers, and Ctrl-C ends them.
        third.terminate(last)
        assert last.wait(END_S) == 0, net.text("last")
        assert workers(*nodes) == living
        last = launcher(net, third, "again")
        net.until_ready(last, "again")
        third.interrupt(last)
        assert last.wait(END_S) == 0, net.text("again")
        net.until(lambda: not workers(*nodes), "workers are left")


def named(machine: Machine, name: str) -> psutil.Process:
    """A process of Ray on a machine."""
    return next(process for process in machine.processes() if process.name() == name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_outlive_a_launcher_that_leads_again_while_ray_is_slow_and_then_fails() -> None:
    """Without ``leave_workers``: only an operator's signal ends them."""
    with network(5, Network) as net:
        leader, standby, *nodes = net.others
        net.start_head()
        for machine, name in zip(nodes, ("prefill", "decode"), strict=True):
            net.join(machine, name, f"baton_{name}")
        net.configure(decode=1, more="routers = 0")
        router(net)
        first = launcher(net, leader, "leader")
        net.until_ready(first, "leader")
        launcher(net, standby, "standby")
        net.until(lambda: WAITS in net.text("standby"), "it does not wait")
        living = workers(*nodes)
        assert len(living) == 2
        load = Load(net)
        leader.suspend(first)
        net.until(lambda: "ready in" in net.text("standby"), "it does not take over")
        leader.resume(first)
        net.until(lambda: WAITS in net.text("leader"), "it does not notice")
        control_store = named(net.head, "gcs_server")
        control_store.suspend()
        standby.power_off()
        time.sleep(SLOW_S)
        assert first.poll() is None, net.text("leader")
        assert workers(*nodes) == living
        control_store.resume()
        net.until(lambda: LEADS_AGAIN in net.text("leader"), "it does not lead")
        assert workers(*nodes) == living
        # It loses its own part of Ray, and cannot go on.
        named(leader, "raylet").kill()
        assert first.wait(END_S) == 1, net.text("leader")
        assert "the workers serve on" in net.text("leader")
        assert workers(*nodes) == living
        last = launcher(net, leader, "last")
        net.until_ready(last, "last")
        assert workers(*nodes) == living
        assert load.end() > 0
        leader.interrupt(last)
        assert last.wait(END_S) == 0, net.text("last")
        net.until(lambda: not workers(*nodes), "workers are left")


def configure(net: Network, more: str) -> None:
    """Without the only prefill worker, decode workers compute prompts."""
    file = net.configure(decode=2, more=more)
    file.write_text(file.read_text().replace('local_prefill = "never"', 'local_prefill = "auto"'))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_launcher_with_another_configuration_replaces_workers_one_by_one() -> None:
    """What routers alone read replaces none; what workers read replaces all, and loses nothing."""
    with network(5, Network) as net:
        machine, *nodes = net.others
        net.start_head()
        for node, name in zip(nodes, ("prefill", "decode-a", "decode-b"), strict=True):
            net.join(node, name, f"baton_{name.partition('-')[0]}")
        configure(net, LIVES_ON)
        router(net)
        first = launcher(net, machine, "first")
        net.until_ready(first, "first")
        living = workers(*nodes)
        assert len(living) == 3
        load = Load(net)
        machine.terminate(first)
        assert first.wait(END_S) == 0, net.text("first")
        configure(net, f"{LIVES_ON}\nmax_waiting_requests = 99")
        second = launcher(net, machine, "second")
        net.until_ready(second, "second")
        machine.terminate(second)
        assert second.wait(END_S) == 0, net.text("second")
        assert workers(*nodes) == living
        configure(net, f"{LIVES_ON}\nslo_tpot_s = 0.2")
        third = launcher(net, machine, "third")
        net.until_ready(third, "third")
        fewest = 3

        def replaced() -> bool:
            nonlocal fewest
            found = workers(*nodes)
            fewest = min(fewest, len(found))
            return len(found) == 3 and not found & living

        net.until(replaced, "not all are replaced")
        assert fewest >= 2, "one at a time"
        assert "of another configuration first" not in net.text("third")
        assert load.end() > 0
        machine.interrupt(third)
        assert third.wait(END_S) == 0, net.text("third")
