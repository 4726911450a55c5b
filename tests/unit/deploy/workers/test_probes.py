"""The listener for probes of a worker's process."""

from __future__ import annotations

import httpx

from deploy.workers.probes import ProbeServer


def test_a_worker_is_live_at_once_and_ready_when_it_serves() -> None:
    ready = False
    server = ProbeServer("127.0.0.1", 0, lambda: ready)

    def status(path: str) -> int:
        url = f"http://127.0.0.1:{server.port}{path}"
        return httpx.get(url, trust_env=False).status_code

    try:
        assert (status("/live"), status("/ready"), status("/metrics")) == (200, 503, 404)
        ready = True
        assert (status("/live"), status("/ready")) == (200, 200)
    finally:
        server.stop()
