"""A worker whose ranks are in two pods, as a LeaderWorkerSet starts them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.network import BATON, END_S, Network, body, network
from tests.support.machines import Machine

CONFIG = """
model = "{model}"
dtype = "float32"
redis_url = "redis://{head}:6390/0"
cluster_id = "groups"
cluster_secret = "a-secret-that-is-long-enough-for-it"
insecure_listen = true
insecure_redis = true
local_prefill = "{local}"
[[pools]]
name = "prefill"
role = "prefill"
tp = 2
rank_placement = "pack"
threads = 1
kv_pool_mib = 16
[[pools]]
name = "decode"
role = "decode"
threads = 1
kv_pool_mib = 16
"""
GROUP, ALONE = 8000, 8010
"""Ports of two routers. That of the first one leaves prompts to the group, and that of the second
one to the decode worker, which has one rank."""


class Pods:
    """The cluster, and the two pods of its prefill worker."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self.model = Path(net.configure(1)).parent / "model"
        self._starts = 0

    def start(
        self, machine: Machine, name: str, *command: str, local: str = "never", pod: int = -1
    ) -> subprocess.Popen[bytes]:
        net = self._net
        file = net.folder / f"{local}.toml"
        file.write_text(CONFIG.format(model=self.model, head=net.head.address, local=local))
        # A container has a folder of its own for temporary files.
        own = net.folder / f"tmp-{name}"
        own.mkdir()
        told = [f"TMPDIR={own}"]
        if pod >= 0:
            leader = net.others[0].address
            told += ["LWS_GROUP_SIZE=2", f"LWS_WORKER_INDEX={pod}", f"LWS_LEADER_ADDRESS={leader}"]
        return net.start(machine, name, "env", *told, BATON, *command, "--config", str(file))

    def group(self) -> list[subprocess.Popen[bytes]]:
        """Both pods of the prefill worker, once more; the one without rank 0 comes first."""
        self._starts += 1
        return [
            self.start(
                self._net.others[pod],
                f"pod-{pod}-{self._starts}",
                *("worker", "--role", "prefill", "--host", self._net.others[pod].address),
                *("--slot", "prefill-0"),
                pod=pod,
            )
            for pod in (1, 0)
        ]


def end_pod(machine: Machine) -> None:
    """Kill all that runs in a pod."""
    for process in machine.processes():
        if process.name() != "cat":
            process.kill()


def answer(net: Network, port: int, prompt: str = "Once upon") -> str:
    """An answer to a prompt that is shorter than a block, so that no worker has it in its cache."""
    asked = net.ask("POST", "/v1/completions", body("", 32) | {"prompt": prompt}, port)
    said, _ = asked.communicate(timeout=END_S)
    assert asked.returncode == 0, said
    return str(json.loads(said)["choices"][0]["text"])


def handoffs(net: Network) -> float:
    return sum(
        value
        for name, value in net.metrics().items()
        if name.startswith("baton_handoffs_total") and 'outcome="ok"' in name
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_in_two_pods_are_one_worker_and_end_together() -> None:
    with network(3, Network) as net:
        pods = Pods(net)
        net.start_store()
        pods.start(net.head, "decode", "worker", "--role", "decode", "--host", net.head.address)
        other, leader = pods.group()
        for port, local in ((GROUP, "never"), (ALONE, "always")):
            told = (f"--http={net.head.address}:{port}", f"--grpc={net.head.address}:{port + 1}")
            pods.start(net.head, f"router-{local}", "router", *told, local=local)
        net.until(net.serves, "no health")
        alone = answer(net, ALONE)
        assert not handoffs(net)
        assert answer(net, GROUP) == alone
        assert handoffs(net) == 1
        # One rank of the worker is in each pod.
        assert [houses_a_rank(machine) for machine in net.others] == [0, 1]
        # A pod that is lost ends its group, which starts again as a whole.
        end_pod(net.others[1])
        other.wait(END_S)
        assert leader.wait(END_S) == 1
        assert "prefill-0 ends: rank 1 has ended" in net.text("pod-0-1")
        other, leader = pods.group()
        net.until(lambda: "prefill-0 serves" in net.text("pod-0-2"), "the group is not back")
        assert answer(net, GROUP, "One day") == answer(net, ALONE, "One day")
        # The end of rank 0's pod is that of the others, whatever SIGTERM they had before.
        net.others[1].terminate(other)
        net.others[0].terminate(leader)
        assert leader.wait(END_S) == 0, net.text("pod-0-2")
        assert other.wait(END_S) == 0, net.text("pod-1-2")
        assert houses_a_rank(net.others[1]) == 0


def houses_a_rank(machine: Machine) -> int:
    """Number of processes of ranks above 0."""
    found = 0
    for process in machine.processes():
        try:
            found += "deploy.workers.local_ranks" in process.cmdline()
        except psutil.Error:
            continue
    return found
