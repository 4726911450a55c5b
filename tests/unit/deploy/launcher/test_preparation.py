"""The launcher pins the commits of what it serves, for all nodes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from rich.console import Console

from baton.config.cluster import Config
from deploy.launcher.preparation import PreparedModel, prepare_model
from deploy.models import demo_model
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.progress import Progress
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import model_paths
from tests.support.hub_stub import HubStub
from tests.support.models import make_tiny_model

ID = "tests/tiny-llama"
DRAFT = "tests/tiny-draft"
FAR = replace(ProcessIdentity.own(), space="another machine")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "baton"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with HubStub() as stub:
        folder = make_tiny_model(tmp_path / "model")
        for name in (ID, DRAFT):
            stub.add(name, folder)
        urls = f"{stub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        yield stub
        huggingface_hub.close_session()


async def prepare(config: Config) -> PreparedModel:
    return await prepare_model(config, Progress(Console(file=io.StringIO())))


async def far_paths(hub: HubStub, config: Config) -> tuple[str, str]:
    """The commits that a worker of another node gets when both branches have moved meanwhile."""
    prepared = await prepare(config)
    for repository in hub.models.values():
        files = repository.commits[repository.refs["main"]]
        repository.commit(files | {"chat_template.jinja": b"new"})
    settings = ActorSettings(
        config=prepared.config.model_dump(mode="json"),
        pool="decode",
        slot="decode-0",
        model_path=str(prepared.model.path),
        model_name=prepared.model.name,
        draft_model_path=prepared.draft_path,
        redis_url="",
        cluster_id="id",
        launcher=FAR,
    )
    model, drafter = model_paths(settings)
    return Path(model).name, Path(drafter).name


async def test_workers_of_other_nodes_get_the_same_commits(hub: HubStub) -> None:
    first = {name: model.refs["main"] for name, model in hub.models.items()}
    config = Config(model=ID, drafter="draft", draft_model=DRAFT)
    assert await far_paths(hub, config) == (first[ID], first[DRAFT])


async def test_a_draft_model_has_a_revision(hub: HubStub) -> None:
    draft = hub.models[DRAFT]
    commit = draft.commit(draft.commits[draft.refs["main"]] | {"README.md": b""}, "v1")
    config = Config(model=ID, drafter="draft", draft_model=DRAFT, draft_revision="v1")
    assert (await far_paths(hub, config))[1] == commit
    with pytest.raises(ValueError, match="draft_revision: it needs a draft_model"):
        Config(draft_revision="v1")


async def test_a_demo_model_of_the_hub_is_pinned(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = hub.models[ID].refs["main"]
    known = replace(demo_model.KNOWN_MODELS[0], name="tiny", hub_id=ID, commit=first)
    monkeypatch.setattr(demo_model, "KNOWN_MODELS", (known,))
    del hub.models[DRAFT]
    config = Config(model="tiny")
    # The other node has an empty cache of its own.
    prepared = await prepare(config)
    model = prepared.model
    assert (model.name, model.commit, prepared.config.revision) == ("tiny", first, first)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub of another node"))
    assert (await far_paths(hub, prepared.config))[0] == first
