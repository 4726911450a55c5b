"""Block hashes, the names by which cached KV blocks are found; and the hash of a tokenizer.

A full block's hash is a keyed BLAKE2b-128 (RFC 7693) over its parent's hash and its token ids. The
key binds the model's fingerprint and the tenant's salt, so equal prompts of two tenants, or of two
models, share nothing.

A cluster has one size of *hash blocks*. A block of a worker's KV cache has that size or a multiple
of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

HASH_BYTES = 16
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
"""Files of a model's folder that determine how text becomes token ids, and which ids end an
answer."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder with further chat templates, NAME.jinja, within a model's folder."""


def text_hash(folder: Path) -> str:
    """Return a hash of those of ``TEXT_FILES`` that a model's folder has, and of its further chat
    templates: 32 hex digits."""
    whole = hashlib.blake2b(digest_size=HASH_BYTES)
    templates = sorted(file.name for file in (folder / TEMPLATE_FOLDER).glob("*.jinja"))
    for name in (*TEXT_FILES, *(f"{TEMPLATE_FOLDER}/{name}" for name in templates)):
        with contextlib.suppress(FileNotFoundError):
            content = (folder / name).read_bytes()
            whole.update(f"{name}:{len(content)}:".encode())
            whole.update(content)
    return whole.hexdigest()


def hash_key(fingerprint: str, salt: bytes = b"") -> bytes:
    """Return the 32-byte key for one model and one salt."""
    # Hashed first: BLAKE2b takes keys of at most 64 bytes.
    key = hashlib.blake2b(fingerprint.encode()).digest()
    return hashlib.blake2b(salt, digest_size=32, key=key).digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, key: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the chained hashes of all full blocks of ``token_ids``.

    ``known`` holds the hashes of the first blocks, which are then not computed again. Token ids
    must lie in 0 … 2³²-1.
    """
    hashes = list(known)
    packed = array("I", token_ids[len(hashes) * block_size :]).tobytes()
    width = block_size * 4
    parent = hashes[-1] if hashes else bytes(HASH_BYTES)
    for offset in range(0, len(packed) - width + 1, width):
        digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=key)
        digest.update(packed[offset : offset + width])
        parent = digest.digest()
        hashes.append(parent)
    return hashes


class HashChain:
    """Computes the hashes of a sequence's full blocks while the sequence grows. Each block is
    hashed once."""

    def __init__(self) -> None:
        self._key = b""
        self._hashes: list[bytes] = []

    def of(self, token_ids: Sequence[int], block_size: int, key: bytes) -> list[bytes]:
        """Return the hashes of all full blocks of ``token_ids``, as ``block_hashes`` does.

        ``token_ids`` must begin with those of the last call.
        """
        known = self._hashes if key == self._key else []
        self._key, self._hashes = key, block_hashes(token_ids, block_size, key, known)
        return self._hashes


def last_hashes(hashes: Sequence[bytes], per_block: int) -> list[bytes]:
    """Return the hashes of full blocks of ``per_block`` hash blocks each.

    A block's hash is that of its last hash block. Since hashes are chained, it stands for all
    tokens before it.
    """
    return list(hashes[per_block - 1 :: per_block])
