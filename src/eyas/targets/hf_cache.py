"""Preallocated K/V of many requests, from which a non-contiguous tree path can be kept.

A ``CachePool`` holds the K/V of ``slots`` requests side by side, so that one pass over several requests reads it
in place; a ``PooledCache`` is one request's slot. ``PoolPass`` is what a transformers model sees as its cache for the
length of a single forward call: it writes the new rows and hands out views.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from eyas.errors import InvalidInputError


class CachePool:
    """K/V tensors [slots, kv_heads, capacity, head_dim] per layer, made when the first keys of a layer arrive.

    Args:
        slots: requests held at once.
        capacity: tokens per slot to begin with; every slot grows together when one needs more.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.free = list(range(slots))[::-1]

    def take(self) -> PooledCache:
        """A free slot as an empty cache; the slot returns to the pool with the cache's last reference."""
        slot = self.free.pop()
        cache = PooledCache(self, slot)
        weakref.finalize(cache, self.free.append, slot)
        return cache

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in every slot."""
        if length <= self.capacity:
            return
        self.capacity = max(length, 2 * self.capacity)
        for side in (self.keys, self.values):
            for layer, old in side.items():
                new = old.new_zeros((*old.shape[:2], self.capacity, old.shape[3]))
                new[:, :, : old.shape[2]] = old
                side[layer] = new

    def tensor(self, side: dict[int, torch.Tensor], layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The layer's tensor [slots, kv_heads, capacity, head_dim], shaped after ``rows`` [B, kv_heads, N, head_dim].

        Zeros, not empty memory: a masked column still multiplies its value by 0, and 0 * nan is nan.
        """
        if layer not in side:
            side[layer] = rows.new_zeros((self.slots, rows.shape[1], self.capacity, rows.shape[3]))
        return side[layer]


class PooledCache:
    """One request's K/V: slot ``slot`` of ``pool``. Implements ``eyas.targets.base.TargetCache``."""

    def __init__(self, pool: CachePool, slot: int) -> None:
        self.pool = pool
        self.slot = slot
        self._length = 0
        self._provisional = 0

    @property
    def length(self) -> int:
        return self._length

    def extend(self, rows: int) -> None:
        """Count the next ``rows`` rows, already written, as committed (prefill)."""
        self._length += rows
        self._provisional = 0

    def provide(self, rows: int) -> None:
        """Note that ``rows`` provisional rows follow the committed prefix (verification)."""
        self._provisional = rows

    def commit(self, path: Sequence[int]) -> None:
        rows = list(path)
        if any(b <= a for a, b in zip(rows, rows[1:], strict=False)) or any(
            not 0 <= r < self._provisional for r in rows
        ):
            raise InvalidInputError(
                f"cannot commit rows {rows}: the last verified tree has {self._provisional} rows, "
                "and a path is increasing"
            )
        start = self._length
        if rows != list(range(len(rows))):
            for side in (self.pool.keys, self.pool.values):
                for tensor in side.values():
                    slot = tensor[self.slot]  # [kv_heads, capacity, head_dim]
                    index = torch.tensor(rows, device=tensor.device) + start
                    slot[:, start : start + len(rows)] = slot[:, index]
        self._length += len(rows)
        self._provisional = 0

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise InvalidInputError(f"cannot truncate a cache of {self._length} tokens to {length}")
        self._length = length
        self._provisional = 0


class PoolPass:
    """The cache of one forward call over B slots of a pool with N new rows each.

    Row i of a slot lands at column ``length + i``, whatever its position id: a tree's rows lie side by side, and the
    mask says who sees whom. Keys are returned for the whole run of slots ``[first, first + B)`` up to column
    ``columns``; slots within the run that take no part are read (masked) but never written.
    """

    def __init__(self, pool: CachePool, caches: Sequence[PooledCache], rows: int) -> None:
        used = [cache.slot for cache in caches]
        self.pool = pool
        self.rows = rows
        self.first = min(used)
        self.batch = max(used) + 1 - self.first
        self.columns = max(cache.length for cache in caches) + rows
        pool.reserve(self.columns)
        self._caches = caches

    def line(self, cache: PooledCache) -> int:
        """The batch line of a cache in this pass."""
        return cache.slot - self.first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, kv_heads, N, head_dim] rows of one layer; return views [B, kv_heads, columns, head_dim]."""
        keys = self._write(self.pool.keys, layer_idx, key_states)
        values = self._write(self.pool.values, layer_idx, value_states)
        return keys, values

    def _write(self, side: dict[int, torch.Tensor], layer: int, rows: torch.Tensor) -> torch.Tensor:
        tensor = self.pool.tensor(side, layer, rows)
        if len(self._caches) == 1:
            cache = self._caches[0]
            tensor[cache.slot, :, cache.length : cache.length + self.rows] = rows[0]
        else:
            slots, lines, columns = self._targets(tensor.device)
            tensor[slots, :, columns] = rows[lines].transpose(1, 2)  # [used, N, kv_heads, head_dim]
        return tensor[self.first : self.first + self.batch, :, : self.columns]

    def _targets(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots [used, 1], batch lines [used], columns [used, N] of the rows to write."""
        slots = torch.tensor([cache.slot for cache in self._caches], device=device)
        starts = torch.tensor([cache.length for cache in self._caches], device=device)
        columns = starts[:, None] + torch.arange(self.rows, device=device)
        return slots[:, None], slots - self.first, columns

    # What transformers asks of a cache besides update().

    is_compileable = False
    is_sliding = (False,)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns - self.rows

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0
