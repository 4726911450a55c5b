"""A router by itself, of a cluster whose launcher runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys

import redis

from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from deploy.launcher.exposure import check_exposure
from deploy.launcher.what_if import WHAT_IF
from deploy.models import model_store
from deploy.processes.ports import choose_ports
from deploy.store.redis_users import store_url
from router.workers.model_commit import commit_of

log = logging.getLogger(__name__)


def serve_router(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises BatonError where it cannot begin."""
    if not config.redis_url:
        raise ConfigError("a router needs --redis-url, which its cluster's workers have, too")
    if not config.cluster_id:
        raise ConfigError(
            "a router needs cluster_id (BATON_CLUSTER_ID, or in the file), as `baton serve` was"
            " given"
        )
    check_exposure(config)
    config = choose_ports(config.model_copy(update={"routers": 1}))
    # Slow to import; whoever is told what is missing need not wait.
    from router.main import RouterSettings, run  # noqa: PLC0415

    url = store_url(config, "router")
    revision = asyncio.run(_revision(config, url))
    model = model_store.resolve(config.model, _tell, config.quantization, revision, weights=False)
    config = config.model_copy(update={"revision": model.commit})
    scheme = "http" if config.tls.fronts is None else "https"
    sys.stdout.write(f"HTTP {scheme}://{config.http}/v1, gRPC {config.grpc}\n")
    sys.stdout.flush()
    run(
        RouterSettings(
            config=config.model_dump(mode="json"),
            redis_url=url,
            cluster_id=config.cluster_id,
            model_path=str(model.path),
            model_name=config.served_model_name or model.name,
            ends_with_parent=False,
            what_if=WHAT_IF,
        )
    )


async def _revision(config: Config, redis_url: str) -> str:
    """That of the workers; where none is known yet, the configured one."""
    async with redis_client(redis_url) as client:
        try:
            records = await Registry(client, config.cluster_id).all()
        except (redis.RedisError, OSError) as error:
            _tell(f"the workers' commit of the model cannot be read from Redis: {error}")
            return config.revision
    return commit_of(records.values(), config.revision)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
