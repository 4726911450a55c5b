"""Settings whose defaults suit almost every cluster: for tests and unusual networks."""

from __future__ import annotations

from pydantic import Field

from baton.config.fields import Section


class AdvancedConfig(Section):
    """Settings for tests and unusual networks. Leave them alone unless a document names one."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """Time between two heartbeats of a worker, which renew its registry entry and its leases, in
    seconds."""
    lease_s: float = Field(default=3.0, gt=0)
    """Time without a heartbeat after which a handoff's reservation ends, in seconds."""
    registry_ttl_s: float = Field(default=4.0, gt=0)
    """Time without a heartbeat after which a worker counts as gone, in seconds."""
    hang_s: float = Field(default=1.0, ge=0.1)
    """Silence after which a worker that runs requests counts as hung, in seconds. Its requests move
    to other workers, if there are any."""
    engine_hang_s: float = Field(default=10.0, ge=0.1)
    """Time without a finished engine step, while one is in flight, after which a responsive worker
    counts as hung, in seconds."""
    head_deadline_s: float = Field(default=10.0, gt=0)
    """Time in which a client must send the head of an HTTP request, or make its connection to
    either listener, in seconds."""
    keep_alive_s: float = Field(default=95.0, gt=0)
    """Time for which an HTTP connection may be idle between two requests, in seconds. Behind a
    proxy or load balancer, it must be longer than theirs."""
    slow_client_s: float = Field(default=30.0, gt=0)
    """Time after which a client that does not read its answer is disconnected, in seconds. It
    counts from when the answer exceeds the connection's buffer. An HTTP client that reads fewer
    than 4096 bytes in this time does not read."""
    max_connections: int = Field(default=4096, ge=16, le=1_000_000)
    """Maximum number of connections to each listener of one router process. With more, the HTTP
    connection that has waited longest for a request is closed; if all of them run requests, and on
    the gRPC listener, new ones are refused. An open connection uses a file descriptor."""
    max_connections_per_client: int = Field(default=0, ge=0, le=1_000_000)
    """Maximum number of HTTP connections from one address to one router process; more get 503, and
    0 is unlimited. An IPv6 network of /64 counts as one address. Behind a proxy all connections
    come from its address: limit them there."""
    index_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Maximum memory of the prefix index in Redis, in MiB. A full index drops the least recently
    used blocks. A million blocks take about 45 MiB, and 2 MiB more for each worker that holds all
    of them."""
    transfer_window_mib: int = Field(default=32, ge=1, le=4096)
    """Maximum KV in flight from one worker to another, and the size of the pair's staging buffer,
    in MiB. Transports without a staging buffer allow four times as much in flight."""
    standby: bool = True
    """Keep a warm standby process on each node with workers. It uses about 200 MiB of memory and
    makes the restart of a worker some seconds faster."""
