"""`baton router`: one more router of a cluster that runs."""

from __future__ import annotations

import threading

import pytest

from baton.client import Client, Message, Sampling
from tests.support.e2e.answers import answer_of, body_of, streamed_from
from tests.support.e2e.cluster import BATON, SECRET, UpProcess, wait_healthy

TOKENS = 24
SAME = Sampling(max_tokens=TOKENS, temperature=0.0)
ASKED = [Message("user", "Name a river.")]


@pytest.mark.timeout(600)
def test_one_more_router_serves_the_same_cluster(cluster: UpProcess) -> None:
    told = {
        "BATON_REDIS_URL": cluster.state.redis_url,
        "BATON_CLUSTER_ID": cluster.cluster_id,
        "BATON_CLUSTER_SECRET": SECRET,
        "BATON_DTYPE": "float32",
        "BATON_QUANTIZATION": "none",
    }
    with UpProcess(env=told, program=(BATON, "router")) as router:
        line = router.wait_for("HTTP ")
        url, grpc = line.removeprefix("HTTP ").split("/v1, gRPC ")
        wait_healthy(url)
        begun = threading.Event()
        text = streamed_from(url, body_of(cluster, TOKENS), begun)
        assert text == answer_of(cluster, TOKENS)
        assert begun.is_set()
        with Client(grpc) as ours, Client(cluster.grpc) as theirs:
            assert ours.chat(ASKED, SAME).text == theirs.chat(ASKED, SAME).text
        router.terminate()
        assert router.wait() == 0, router.text
    # The cluster and its own router go on.
    assert answer_of(cluster)
