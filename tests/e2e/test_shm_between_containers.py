"""Workers in different containers of one machine hand KV off through shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.e2e.network import BATON, END_S, Network, body, network
from tests.support.machines import Machine

CONFIG = """
model = "{model}"
dtype = "float32"
redis_url = "redis://{head}:6390/0"
cluster_id = "containers"
cluster_secret = "a-secret-that-is-long-enough-for-it"
insecure_listen = true
insecure_redis = true
local_prefill = "never"
shm_folder = "{folder}"
http = "{head}:8000"
grpc = "{head}:8001"
[[pools]]
name = "prefill"
role = "prefill"
threads = 1
kv_pool_mib = 16
[[pools]]
name = "decode"
role = "decode"
threads = 1
kv_pool_mib = 16
"""


def handoffs(net: Network) -> dict[str, float]:
    """Number of handoffs that have succeeded, by transport."""
    found: dict[str, float] = {}
    for name, value in net.metrics().items():
        for transport in ("shm", "grpc"):
            if name.startswith("baton_handoffs_total") and f'transport="{transport}"' in name:
                found[transport] = found.get(transport, 0.0) + value * ('outcome="ok"' in name)
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kv_crosses_by_shared_memory_between_process_namespaces() -> None:
    with network(3, Network) as net:
        shared = net.folder / "shm"
        shared.mkdir()
        model = Path(net.configure(1)).parent / "model"
        file = net.folder / "plain.toml"
        file.write_text(CONFIG.format(model=model, head=net.head.address, folder=shared))
        net.start_store()

        def start(machine: Machine, name: str, *command: str) -> None:
            # A container has a folder of its own for temporary files.
            own = net.folder / name
            own.mkdir()
            told = ("env", f"TMPDIR={own}", BATON, *command, "--config", str(file))
            net.start(machine, name, *told)

        for machine, role in zip(net.others, ("prefill", "decode"), strict=True):
            start(machine, role, "worker", "--role", role, "--host", machine.address)
        start(net.head, "router", "router")
        net.until(net.serves, "no health")
        asked = net.ask("POST", "/v1/completions", body("Once", 32))
        said, _ = asked.communicate(timeout=END_S)
        assert asked.returncode == 0, said
        assert json.loads(said)["usage"]["completion_tokens"] == 32
        counts = handoffs(net)
        assert counts["shm"] >= 1
        assert not counts.get("grpc")
