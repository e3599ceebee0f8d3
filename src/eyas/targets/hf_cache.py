"""Preallocated K/V of many requests, from which a non-contiguous tree path can be kept.

A ``CachePool`` holds the K/V of many requests side by side, so that one pass over several of them reads it in
place; a ``PooledCache`` is one request's slot. ``PoolPass`` is what a transformers model sees as its cache for the
length of a single forward call: it writes the new rows and hands out views.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from eyas.errors import InvalidInputError


class CachePool:
    """K/V tensors [slots, kv_heads, capacity, head_dim] per layer, made when the first rows of a layer arrive.

    Slots are counted when caches are taken and get memory with the next pass: caches taken before the first pass
    cost exactly their own memory.

    Args:
        capacity: tokens per slot to begin with; every slot grows together when one needs more.
    """

    def __init__(self, capacity: int) -> None:
        self.slots = 0
        self.capacity = capacity
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._free: list[int] = []

    def take(self) -> PooledCache:
        """An empty cache in a slot of its own; the slot is free again with the cache's last reference."""
        if not self._free:
            self._free.append(self.slots)
            self.slots += 1
        slot = self._free.pop()
        cache = PooledCache(self, slot)
        weakref.finalize(cache, self._release, slot)
        return cache

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in every slot."""
        if length > self.capacity:
            self.capacity = max(length, 2 * self.capacity)

    def tensor(self, side: dict[int, torch.Tensor], layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The layer's tensor, large enough for all slots; shaped after ``rows`` [B, kv_heads, N, head_dim].

        Zeros, not empty memory: a masked column still multiplies its value by 0, and 0 * nan is nan.
        """
        old = side.get(layer)
        if old is not None and old.shape[0] >= self.slots and old.shape[2] >= self.capacity:
            return old
        slots = self.slots if old is None or old.shape[0] >= self.slots else max(self.slots, 2 * old.shape[0])
        if old is not None:
            slots = max(slots, old.shape[0])
        new = rows.new_zeros((slots, rows.shape[1], self.capacity, rows.shape[3]))
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        side[layer] = new
        return new

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        if len(self._free) == self.slots:  # nobody left: give the memory back
            self.slots = 0
            self._free.clear()
            self.keys.clear()
            self.values.clear()


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

    @torch.inference_mode()  # the pool's tensors are born in a forward pass under it
    def commit(self, path: Sequence[int]) -> None:
        rows = list(path)
        if any(b <= a for a, b in pairwise(rows)) or any(not 0 <= r < self._provisional for r in rows):
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
    """The cache of one forward call over B caches of a pool with N new rows each.

    Row i of a cache lands at column ``length + i``, whatever its position id: a tree's rows lie side by side, and the
    mask says who sees whom. Keys come back up to column ``columns``, the longest cache's end: as a view of the pool
    where the caches' slots are neighbours in order, else as a copy.
    """

    def __init__(self, pool: CachePool, caches: Sequence[PooledCache], rows: int) -> None:
        self.pool = pool
        self.rows = rows
        self.columns = max(cache.length for cache in caches) + rows
        pool.reserve(self.columns)
        self._slots = [cache.slot for cache in caches]
        self._starts = [cache.length for cache in caches]
        first = self._slots[0]
        self._neighbours = self._slots == list(range(first, first + len(caches)))
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, kv_heads, N, head_dim] rows of one layer; return [B, kv_heads, columns, head_dim]."""
        keys = self._write(self.pool.keys, layer_idx, key_states)
        values = self._write(self.pool.values, layer_idx, value_states)
        return keys, values

    def _write(self, side: dict[int, torch.Tensor], layer: int, rows: torch.Tensor) -> torch.Tensor:
        tensor = self.pool.tensor(side, layer, rows)
        first, count = self._slots[0], len(self._slots)
        if count == 1:
            tensor[first, :, self._starts[0] : self.columns] = rows[0]
            return tensor[first : first + 1, :, : self.columns]
        if self._index is None:  # the same for every layer
            slots = torch.tensor(self._slots, device=rows.device)
            starts = torch.tensor(self._starts, device=rows.device)
            self._index = slots, starts[:, None] + torch.arange(self.rows, device=rows.device)
        slots, columns = self._index
        tensor[slots[:, None], :, columns] = rows.transpose(1, 2)  # [B, N, kv_heads, head_dim]
        if self._neighbours:
            return tensor[first : first + count, :, : self.columns]
        return tensor[slots, :, : self.columns]

    # What transformers asks of a cache besides update().

    is_compileable = False
    is_sliding = (False,)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns - self.rows

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0
