"""`baton serve` with vLLM's names and VLLM_API_KEY: the key is asked for, and is found nowhere."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.e2e.cluster import BATON, START_S, UpProcess

pytestmark = pytest.mark.long

KEY = "token-of-a-test-7d1c"


def test_a_key_of_the_environment_is_required_and_passed_on_to_nothing() -> None:
    words = ["smollm2-135m-instruct", "--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "8"]
    program = (BATON, "serve")
    with UpProcess(*words, env={"VLLM_API_KEY": KEY}, program=program) as serving:
        serving.wait_ready()
        body = {"model": serving.model, "prompt": "Once upon a time", "max_tokens": 3}
        shown = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(trust_env=False, timeout=START_S, base_url=serving.http) as client:
            assert client.get("/health").status_code == httpx.codes.OK
            for headers, status in (({}, 401), ({"authorization": "Bearer x"}, 401), (shown, 200)):
                answer = client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == status, answer.text
            assert client.get("/metrics", headers=shown).status_code == httpx.codes.OK
            drain = client.post("/v1/workers/decode-0/drain", headers=shown)
            assert drain.status_code == httpx.codes.FORBIDDEN, drain.text
        run = Path(serving.state.run_directory)
        processes = [one for one in psutil.process_iter() if is_of(one, run)]
        assert len(processes) > 4
        assert not [one for one in processes if KEY in str(one.environ())]
        for file in run.rglob("*"):
            if file.is_file():
                assert KEY.encode() not in file.read_bytes(), file
        assert KEY not in serving.text
        serving.terminate()
        assert serving.wait() == 0, serving.text


def is_of(process: psutil.Process, run: Path) -> bool:
    try:
        return process.environ().get("BATON_RUN_DIRECTORY") == str(run)
    except psutil.Error:
        return False
