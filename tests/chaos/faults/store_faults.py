"""What may happen to the store, or to the way there."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.harness.proxy import Wire

_FULL_BYTES = 1
_SLOW_S = 0.3


class StoreKilled(Fault):
    """It dies, and comes back empty."""

    async def strike(self) -> None:
        await self.cluster.store.kill()

    async def heal(self) -> None:
        await self.cluster.store.start()


class StoreFailedOver(Fault):
    """It dies, and a while later its replica takes its place, with what had come to it by then."""

    async def prepare(self) -> None:
        await self.cluster.store.add_replica()

    async def drop(self) -> None:
        await self.cluster.store.remove_replica()

    async def strike(self) -> None:
        await self.cluster.store.kill()

    async def heal(self) -> None:
        await self.cluster.fail_over()


class StoreStopped(Fault):
    """It hangs."""

    async def strike(self) -> None:
        self.cluster.store.freeze()

    async def heal(self) -> None:
        self.cluster.store.thaw()


class StoreFlushed(Fault):
    """It forgets everything."""

    async def strike(self) -> None:
        await self.cluster.store.flush()


class StoreFull(Fault):
    """It refuses to write."""

    async def strike(self) -> None:
        await self.cluster.store.set_memory(_FULL_BYTES)

    async def heal(self) -> None:
        await self.cluster.store.set_memory(0)


class StorePassword(Fault):
    """It knows the cluster's password no more, and has cut all connections."""

    async def strike(self) -> None:
        await self.cluster.store.change_password()

    async def heal(self) -> None:
        await self.cluster.store.restore_password()


class _StoreWire(Fault):
    """The way there is bad."""

    wire: Wire

    async def strike(self) -> None:
        self.cluster.wire.lay(self.wire)

    async def heal(self) -> None:
        self.cluster.wire.lay(Wire())


class StoreSlow(_StoreWire):
    """Every call takes longer than its deadline."""

    wire = Wire(delay_s=_SLOW_S)


class StoreSilent(_StoreWire):
    """It receives and executes commands, and its answers do not arrive: half-open."""

    wire = Wire(back=False)


class StoreDeaf(_StoreWire):
    """It hears nothing, on connections that stay open."""

    wire = Wire(there=False)


class StoreResets(_StoreWire):
    """Connections are reset, new ones at once."""

    wire = Wire(broken=True)
