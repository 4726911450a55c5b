"""`baton up` with a bound on the context: what it serves, shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from baton.client import Client
from tests.support.e2e.cluster import PATIENT, START_S, UpProcess
from tests.support.models import make_tiny_model

CONTEXT = 16_384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), context=CONTEXT)


def bounded(folder: Path, tokens: int, kv_pool_mib: int = 64) -> UpProcess:
    pools = [{"name": r, "role": r, "kv_pool_mib": kv_pool_mib} for r in ("prefill", "decode")]
    env = {"BATON_MAX_MODEL_LEN": str(tokens), "BATON_POOLS": json.dumps(pools)}
    return UpProcess("--model", str(folder), env=PATIENT | env)


@pytest.mark.long
def test_every_interface_shows_the_bound_and_holds_to_it(folder: Path) -> None:
    with bounded(folder, 100) as up:
        up.wait_ready()
        with httpx.Client(base_url=up.http, trust_env=False, timeout=START_S) as http:
            card = http.get("/v1/models").json()["data"][0]
            assert card["max_model_len"] == 100
            assert http.get(f"/v1/models/{up.model}").json() == card
            assert http.get("/v1/model/info").json()["max_model_len"] == 100
            asked = http.post("/tokenize", json={"prompt": "one"}).json()
            assert asked["max_model_len"] == 100
            body = {"model": up.model, "prompt": [5] * 120, "max_tokens": 4}
            refused = http.post("/v1/completions", json=body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "100 tokens" in error["message"]
            assert "120" in error["message"]
            body |= {"prompt": [5] * 90, "max_tokens": 10, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 10
        with Client(up.grpc) as client:
            assert [model.context_length for model in client.models()] == [100]


@pytest.mark.long
def test_a_bound_above_the_models_context_is_refused_at_once(folder: Path) -> None:
    with bounded(folder, CONTEXT + 1) as up:
        assert up.wait(START_S) == 1
        assert f"max_model_len is {CONTEXT + 1}, and the model's context is {CONTEXT}" in up.text
        assert "loading the model into the workers" not in up.text


@pytest.mark.long
def test_a_pool_without_room_for_the_bound_is_refused(folder: Path) -> None:
    with bounded(folder, CONTEXT, kv_pool_mib=1) as up:
        assert up.wait(START_S) == 1
        assert f"a sequence of max_model_len {CONTEXT} tokens needs 2.0 MiB of KV" in up.text
        assert "the pool has 1.0 MiB, enough for 8192 tokens; raise kv_pool_mib" in up.text
