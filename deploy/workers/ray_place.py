"""Where Ray has put this process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RayPlace:
    """A node of Ray's."""

    host: str
    """The node's address: loopback, where all of the cluster is on one machine."""
    node: str
    """Ray's id of it."""
    gcs: str
    """host:port of Ray's control store."""

    @classmethod
    def own(cls) -> RayPlace:
        """That of this worker process of Ray's, or of this driver."""
        import ray  # noqa: PLC0415

        context = ray.get_runtime_context()
        return cls(
            host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            node=context.get_node_id(),
            gcs=str(context.gcs_address),
        )
