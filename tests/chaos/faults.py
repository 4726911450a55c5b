"""Which class does what a kind's name says."""

from __future__ import annotations

from tests.chaos import (
    clock_faults,
    partition_faults,
    resource_faults,
    signal_faults,
    store_faults,
)
from tests.chaos.fault import Fault

FAULTS: dict[str, type[Fault]] = {
    "prefill killed": signal_faults.Killed,
    "decode killed": signal_faults.Killed,
    "router killed": signal_faults.Killed,
    "prefill stopped": signal_faults.Stopped,
    "decode stopped": signal_faults.Stopped,
    "router stopped": signal_faults.Stopped,
    "store killed": store_faults.StoreKilled,
    "store stopped": store_faults.StoreStopped,
    "store flushed": store_faults.StoreFlushed,
    "store slow": store_faults.StoreSlow,
    "store full": store_faults.StoreFull,
    "store password changed": store_faults.StorePassword,
    "store silent": store_faults.StoreSilent,
    "store hears nothing": store_faults.StoreDeaf,
    "store resets": store_faults.StoreResets,
    "prefill cut off": partition_faults.CutOff,
    "decode cut off": partition_faults.CutOff,
    "decode hears nothing": partition_faults.Deaf,
    "decode is not heard": partition_faults.Mute,
    "decode loses packets": partition_faults.Lossy,
    "decode without store": partition_faults.WithoutStore,
    "decode without descriptors": resource_faults.NoDescriptors,
    "decode without memory": resource_faults.NoMemory,
    "disk full": resource_faults.DiskFull,
    "slow clients": resource_faults.SlowClients,
    "clock an hour ahead": clock_faults.Ahead,
    "clock an hour behind": clock_faults.Behind,
}
"""By the names of ``tests.chaos.kinds.KINDS``."""
