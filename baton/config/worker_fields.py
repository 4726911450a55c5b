"""The part of the configuration that workers read, and two hashes of it.

The supervisor replaces workers that were started with another ``workers_hash``, one by one. A
launcher ends all workers first if ``shared_hash`` differs: then old and new ones cannot work
together. What routers or the launcher alone read is in neither, and changes without a worker's
restart. A test compares ``WORKER_FIELDS`` with the code of the workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from baton.config.access import TenantConfig
from baton.config.cluster import Config
from baton.version import VERSION

WORKER_FIELDS: Mapping[str, Any] = {
    # The model and its engine.
    "model": True,
    "revision": True,
    "served_model_name": True,
    "max_model_len": True,
    "dtype": True,
    "quantization": True,
    "kv_dtype": True,
    "deterministic": True,
    "drafter": True,
    "draft_model": True,
    "draft_revision": True,
    "pools": True,
    "block_size": True,
    "slo_tpot_s": True,
    # KV blocks, and their way to other workers.
    "transport": True,
    "data_network": True,
    "shm_folder": True,
    "kv_host_mib": True,
    "kv_disk_mib": True,
    "kv_disk_path": True,
    "max_pinned_fraction": True,
    "tenants": True,
    # The cluster.
    "cluster_secret": True,
    "tls": {"folder", "redis_ca"},
    "drain_deadline_s": True,
    "advanced": {
        *("heartbeat_s", "registry_ttl_s", "lease_s", "hang_s"),
        *("index_mib", "transfer_window_mib", "standby"),
    },
    # Logs, traces and metrics.
    "log_level": True,
    "log_format": True,
    "log_to": True,
    "vllm_metrics": True,
    "otlp_endpoint": True,
    "trace_ratio": True,
    "metrics_port": True,
}
"""The fields that workers read, in the form of pydantic's ``include``. They also read the address
of the store, which is ``redis_worker_url`` or ``redis_url``."""


SHARED_FIELDS = frozenset(
    (
        *("model", "revision", "served_model_name", "max_model_len", "dtype", "quantization"),
        *("kv_dtype", "deterministic", "drafter", "draft_model", "draft_revision", "block_size"),
        *("transport", "cluster_secret", "tls"),
    )
)
"""The fields in which the workers of one answer must agree. A launcher ends all workers before it
changes one of them. Workers that register themselves, as pods do, serve side by side with others:
by fingerprint and ``kv_group``, or only with routers of their own (``router.workers.model_check``).
Another ``cluster_secret`` or ``tls`` is refused at each connection."""


def shared_hash(config: Config) -> str:
    """Return a hash of what all workers and routers of a cluster must agree in."""
    include = {name: part for name, part in WORKER_FIELDS.items() if name in SHARED_FIELDS}
    shared = config.model_dump(mode="json", include=include)
    pools = {pool.name: pool.role for pool in config.pools}
    store = urlsplit(_worker_store(config))
    where = store.netloc.rpartition("@")[2], store.path
    return _hash([shared, pools, where])


def workers_hash(config: Config) -> str:
    """Return a hash of Baton's version and of the parts of a configuration that its workers read.

    The password in the store's address is one of them; that in a ``password_file`` is not.
    """
    read = config.model_dump(mode="json", include=dict(WORKER_FIELDS))
    # Workers read one field of tenants, and a new tenant with its default changes nothing for them.
    whole = TenantConfig.model_fields["max_pinned_fraction"].default
    shares = {one.name: one.max_pinned_fraction for one in config.tenants}
    read["tenants"] = {name: share for name, share in shares.items() if share != whole}
    return _hash([VERSION, read, _worker_store(config)])


def _worker_store(config: Config) -> str:
    return config.redis_worker_url or config.redis_url


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
