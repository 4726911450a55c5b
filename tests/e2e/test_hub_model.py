"""`baton serve org/name`: from the hub's API to an answer."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.e2e.cluster import PATIENT, UpProcess
from tests.support.e2e.rolling_restart import until
from tests.support.hub_stub import TOKEN, HubStub
from tests.support.models import make_tiny_model

ID = "tests/tiny-llama"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_id_of_the_hub_is_served(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", head_dim=16)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with HubStub() as hub:
        model = hub.add(ID, folder)
        model.private = True
        commit = model.refs["main"]
        env = PATIENT | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": TOKEN,
        }
        with UpProcess("--model", ID, env=env) as up:
            up.wait_ready()
            assert f"{ID} (commit {commit})" in up.wait_for("  model")
            assert len(hub.downloads("model.safetensors")) == 1
            with httpx.Client(base_url=up.http, timeout=60) as http:
                assert [one["id"] for one in http.get("/v1/models").json()["data"]] == [ID]
                assert http.get(f"/v1/models/{ID}").json()["id"] == ID
                assert http.get("/v1/model/info").json()["revision"] == commit
                question = {
                    "model": ID,
                    "messages": [{"role": "user", "content": "Hello!"}],
                    "max_tokens": 4,
                    "temperature": 0,
                }
                answer = http.post("/v1/chat/completions", json=question)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == ID
                assert answer.json()["usage"]["completion_tokens"] > 0
            up.terminate()
            assert up.wait() == 0, up.text
        assert TOKEN not in up.text
        hub.close()
        with UpProcess("--model", ID, env=env) as up:
            up.wait_for(f"getting the model {ID}: cannot reach the hub")
            # From here on the start is that of a folder.
            up.wait_for("loading the model into the workers")
            up.terminate()
            assert up.wait() == 0, up.text


@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_download(tmp_path: Path) -> None:
    with HubStub() as hub:
        hub.add(ID, make_tiny_model(tmp_path / "model"))
        hub.stalled["model.safetensors"] = 1000
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        with UpProcess("--model", ID, env=env) as up:
            up.wait_for(f"getting the model {ID}: downloading ")
            until(lambda: bool(hub.downloads("model.safetensors")), "the weights were asked for")
            up.interrupt()
            assert up.wait() == 0, up.text
        assert "ending ..." in up.text
