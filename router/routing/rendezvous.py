"""Rendezvous hashing: a session's worker stays the same while workers come and go.

Every worker has a score for a session, and the highest takes it: whoever leaves moves its own
sessions only, and whoever comes takes an equal share from everybody. Thaler and Ravishankar, Using
Name-Based Mappings to Increase Hit Rates, IEEE/ACM Transactions on Networking 6(1), 1998.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def hash_of(name: str) -> int:
    """64 bits of a name, the same in every process."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def scores(workers: Hashes, key: int) -> Hashes:
    """Of each worker for one key: both hashes mixed by SplitMix64's finaliser.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    mixed = workers ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
