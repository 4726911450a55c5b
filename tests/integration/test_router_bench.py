"""`baton bench router` in small: every process of it is real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loadtest.peer_servers import cores
from loadtest.router_bench import RouterBenchSettings, measure_router

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.skipif(len(cores()) < 2, reason="one core for the router, one for the load")
async def test_all_of_it_runs(tiny_model: Path, tmp_path: Path) -> None:
    """That every answer comes whole is checked by the client; here that there are figures."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny_model / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    said: list[str] = []
    settings = RouterBenchSettings(
        tmp_path,
        rate=100.0,
        requests=20,
        warm_up_requests=5,
        prompt_words=20,
        answer_tokens=4,
        step_s=0.002,
        streams=4,
        tokens_per_s=(200,),
        rate_s=0.2,
        first_token_id=40,
    )
    figures = await measure_router(settings, said.append)
    assert figures.through.first_ms_p99 >= figures.through.first_ms_p50 > 0
    assert figures.direct.end_ms_p50 > figures.direct.first_ms_p50 > 0
    (rate,) = figures.rates
    assert rate.passed > 0
    assert rate.events_per_token > 0.5, "one event for each token, or nearly"
    assert said
