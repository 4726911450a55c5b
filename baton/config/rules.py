"""Rules over several fields of the configuration. Each raises ValueError with what to change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from baton.config.choices import BACKGROUND_CLASS, DEFAULT_TENANT, Role
from baton.config.fields import split_host_port
from baton.config.pools import ContextClass, PoolConfig
from baton.host.data_network import check_network

if TYPE_CHECKING:
    from baton.config.cluster import Config

_RANK_TRANSPORTS = ("auto", "shm", "grpc")
"""Transports that carry the KV heads of single ranks."""
_NETWORK_TRANSPORTS = ("gloo", "nccl", "nixl")
"""Transports that send KV blocks by AES-GCM in the ``data_network``, over libraries that check no
certificate."""


def check(config: Config) -> None:
    """Apply all rules. Raises ValueError for the first that is broken."""
    for rule in (
        _pools,
        _classes,
        _keys,
        _prices,
        _heartbeats,
        _machines,
        _batch_store,
        _class_pools,
        _autoscaler,
        _data_network,
        _encryption,
        _draft_model,
        _kv_blocks,
        _context_length,
        _tensor_ranks,
        _context_ranks,
    ):
        rule(config)


def _pools(config: Config) -> None:
    if not any(pool.role == "decode" for pool in config.pools):
        raise ValueError("pools: at least one decode pool is needed")
    names = [pool.name for pool in config.pools]
    if len(set(names)) != len(names):
        raise ValueError(f"pools: names must differ, got {names}")


def _classes(config: Config) -> None:
    bounds = [math.inf if c.max_tokens is None else c.max_tokens for c in config.classes]
    if not bounds or bounds != sorted(set(bounds)) or bounds[-1] != math.inf:
        raise ValueError("classes: max_tokens must rise, and the last class has none")


def _keys(config: Config) -> None:
    for kind, names in (
        ("tenants", [tenant.name for tenant in config.tenants]),
        ("keys", [key.name for key in config.keys]),
    ):
        if len(set(names)) != len(names):
            raise ValueError(f"{kind}: names must differ, got {names}")
    hashes = [key.sha256 for key in config.keys]
    if len(set(hashes)) != len(hashes):
        raise ValueError("keys: no two may have the same sha256")
    if config.require_key and "" in hashes:
        raise ValueError("keys: one without a sha256 contradicts require_key")
    if any(key.allows("admin") and not key.sha256 for key in config.keys):
        raise ValueError("keys: one without a sha256 cannot be an admin's")
    known = {DEFAULT_TENANT, *(tenant.name for tenant in config.tenants)}
    for key in config.keys:
        if key.tenant not in known:
            raise ValueError(f"keys: {key.name} belongs to an unknown tenant, {key.tenant!r}")


def _prices(config: Config) -> None:
    prices = config.prices
    known = [*(one.name for one in config.classes), BACKGROUND_CLASS]
    priced = [one.name for one in config.class_prices]
    if len(set(priced)) != len(priced):
        raise ValueError(f"class_prices: names must differ, got {priced}")
    if unknown := [name for name in priced if name not in known]:
        raise ValueError(f"class_prices: {unknown[0]!r} is no class; there are {', '.join(known)}")
    if any(one.input or one.output for one in (prices, *config.class_prices)):
        return
    owners = [
        *(one.name for one in config.tenants if one.budget),
        *(one.name for one in config.keys if one.budget),
    ]
    if owners:
        raise ValueError(
            f"prices: {owners[0]} has a budget, and tokens have no price: set [prices]"
        )


def _heartbeats(config: Config) -> None:
    silence_s = min(config.advanced.registry_ttl_s, config.advanced.lease_s)
    if config.advanced.heartbeat_s * 2 > silence_s:
        raise ValueError(
            "advanced.heartbeat_s must be at most half of advanced.registry_ttl_s and of"
            " advanced.lease_s"
        )


def _machines(config: Config) -> None:
    if not config.ray_address:
        if not config.routers:
            raise ValueError("routers: 0 needs a ray_address; without one no router would serve")
        if config.leave_workers:
            raise ValueError("leave_workers: it needs a ray_address; workers end with their Ray")
        return
    if config.ray_address != "auto":
        split_host_port(config.ray_address)
    if not config.redis_url:
        raise ValueError(
            "ray_address: workers on other machines need a redis_url that they reach, too; the"
            " embedded Valkey listens on loopback"
        )
    if config.gcs_store:
        raise ValueError(
            "gcs_store: it cannot be set with a ray_address; configure it where that Ray starts"
        )
    if config.leave_workers and not config.cluster_id:
        raise ValueError(
            "leave_workers: it needs a cluster_id, by which the next launcher finds the workers"
        )


def _batch_store(config: Config) -> None:
    if config.batch_store in ("", "local"):
        return
    if not config.redis_url:
        raise ValueError(
            "batch_store: it needs a redis_url; the embedded Valkey loses the state of batches"
            " when the cluster ends"
        )
    if not config.cluster_id:
        raise ValueError("batch_store: it needs a cluster_id, by which routers find the batches")


def _class_pools(config: Config) -> None:
    names = {pool.name for pool in config.pools}
    for one in config.classes:
        unknown = [name for name in one.pools if name not in names]
        if unknown:
            raise ValueError(f"classes: {one.name} owns {unknown[0]!r}, which is no pool")
        if not _pools_of(one, "decode", config):
            raise ValueError(f"classes: {one.name} has no decode pool: others own all of them")
        prefill = _pools_of(one, "prefill", config)
        if config.local_prefill_of(one) == "never" and not sum(pool.count for pool in prefill):
            raise ValueError(
                f"local_prefill: never leaves the prompts of class {one.name} to prefill workers,"
                " and it has none: set auto, or give it a prefill pool with a count of at least 1"
                " (--prefill 1)"
            )


def _pools_of(context_class: ContextClass, role: Role, config: Config) -> list[PoolConfig]:
    """Return the pools of a role that may serve a class."""
    pools = [pool for pool in config.pools if pool.role == role]
    owned = {name for one in config.classes for name in one.pools}
    own = [pool for pool in pools if pool.name in context_class.pools]
    return own or [pool for pool in pools if pool.name not in owned]


def _autoscaler(config: Config) -> None:
    if not config.autoscaler.enabled:
        return
    if sorted(pool.role for pool in config.pools) != ["decode", "prefill"]:
        raise ValueError(
            "autoscaler: it needs one prefill pool, which may have a count of 0, and one decode"
            " pool, and no others"
        )
    if config.needs_prefill and not config.autoscaler.min_prefill:
        raise ValueError(
            "autoscaler: min_prefill is 0, and local_prefill never leaves prompts to prefill"
            " workers: set min_prefill 1, or local_prefill auto"
        )
    configured = sum(pool.count for pool in config.pools)
    if configured < config.autoscaler.min_prefill + config.autoscaler.min_decode:
        raise ValueError("autoscaler: the pools have fewer workers than its minimum")


def _data_network(config: Config) -> None:
    network, is_used = config.data_network, config.transport in _NETWORK_TRANSPORTS
    if network:
        check_network(network)
        if not is_used:
            raise ValueError(
                f"data_network: transport {config.transport} does not use it: leave it out, or set"
                f" transport to one of {', '.join(_NETWORK_TRANSPORTS)}"
            )
    elif is_used and config.tls.folder:
        raise ValueError(
            f"transport: {config.transport} accepts connections without certificates: set"
            " data_network to the network that only the workers use, or transport to auto"
        )


def _encryption(config: Config) -> None:
    if not config.tls.folder or config.tls.clear_kv:
        return
    for pool in config.pools:
        if pool.ranks > 1 and pool.rank_placement != "strict_pack":
            raise ValueError(
                f"pools: the ranks of {pool.name} communicate unencrypted, and may run on several "
                "nodes: use rank_placement = strict_pack, or set tls.clear_kv = true"
            )


def _draft_model(config: Config) -> None:
    if config.drafter not in ("auto", "none", "ngram") and not config.draft_model:
        raise ValueError(f"drafter: {config.drafter} needs a draft_model")
    if config.draft_revision and not config.draft_model:
        raise ValueError("draft_revision: it needs a draft_model")


def _kv_blocks(config: Config) -> None:
    for pool in config.pools:
        if pool.block_size % config.block_size:
            raise ValueError(
                f"pools: {pool.name} has a block_size of {pool.block_size} tokens, and must "
                f"have a multiple of the cluster's {config.block_size}"
            )
    types = {pool.name: config.kv_dtype_of(pool) for pool in config.pools}
    if config.deterministic and len(set(types.values())) > 1:
        listed = ", ".join(f"{name} {kind}" for name, kind in types.items())
        raise ValueError(f"deterministic needs one kv_dtype in all pools, and they have: {listed}")


def _context_length(config: Config) -> None:
    largest = max(config.pools, key=config.block_size_of)
    if 0 < config.max_model_len < (size := config.block_size_of(largest)):
        raise ValueError(
            f"max_model_len: {config.max_model_len} tokens are less than a KV block of the pool"
            f" {largest.name}: set at least its block_size, {size}, or 0 for the model's own"
        )


def _tensor_ranks(config: Config) -> None:
    divided = next((pool.name for pool in config.pools if pool.tp > 1), None)
    if divided is None:
        return
    for wanted, name, instead in (
        *_not_with_ranks(config),
        (
            config.transport not in _RANK_TRANSPORTS,
            f"transport {config.transport}",
            f"one of {', '.join(_RANK_TRANSPORTS)}",
        ),
        (
            len({config.block_size_of(pool) for pool in config.pools}) > 1,
            "pools of unequal block_size",
            "give all pools one",
        ),
        (
            len({config.kv_dtype_of(pool) for pool in config.pools}) > 1,
            "pools of unequal kv_dtype",
            "give all pools one",
        ),
    ):
        if wanted:
            raise ValueError(
                f"pools: {divided} has tp above 1, which does not work with {name}: use tp 1, or "
                f"{instead}"
            )


def _context_ranks(config: Config) -> None:
    for pool in config.pools:
        if pool.cp > 1:
            _check_context_ranks(config, pool)


def _check_context_ranks(config: Config, pool: PoolConfig) -> None:
    for wanted, name, instead in (
        (pool.tp > 1, "tp above 1", "take tp 1"),
        (pool.role != "prefill", f"role {pool.role}", "give cp to a prefill pool"),
        (config.autoscaler.enabled, "autoscaler, which changes roles", "leave autoscaler out"),
        *_not_with_ranks(config),
    ):
        if wanted:
            raise ValueError(
                f"pools: {pool.name} has cp above 1, which does not work with {name}: use cp 1, "
                f"or {instead}"
            )


def _not_with_ranks(config: Config) -> tuple[tuple[bool, str, str], ...]:
    """Return what multi-rank workers do not support: whether it is set, its name, and the fix."""
    return (
        (config.deterministic, "deterministic", "leave deterministic out"),
        (bool(config.kv_host_mib), "kv_host_mib", "take kv_host_mib 0"),
        (bool(config.kv_disk_mib), "kv_disk_mib", "take kv_disk_mib 0"),
        (bool(config.draft_model), f"drafter {config.drafter}", "take drafter ngram or none"),
    )
