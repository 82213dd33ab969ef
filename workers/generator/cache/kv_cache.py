"""Keys and values of everything that is being generated, in pages of a few positions each.

The pool is allocated once (untouched pages cost nothing on a CPU); `PagePool` and `seating` know who holds a page. Keys
are stored transposed, [pages, kv_heads, head_dim, page], as the product with a query reads them; values [pages,
kv_heads, page, head_dim]. Of latent attention one latent is kept for all heads, whose first `values_within` numbers are
the value too: values are a view of the keys. Where there are groups of layers (`page_groups`), the same tensors serve a
layer of each, and a page belongs to one group. `routes`, the experts that each position was routed to, are recorded on
request (`record_routes`), in pages of the first group. Positions beyond a sequence's length in its last page hold
values of earlier holders. They are masked, so they must only be finite, since 0 * nan is nan: `clear` wipes pages of a
sequence that was not.

Shapes: N pages, K kv heads, D head dim, P positions of a page, T new positions, L length; of routes M mixture layers, C
choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.model.device import sent

#: Positions of a page.
PAGE_TOKENS = 32
#: How much memory of a device the copies of pages on their way out or in take: pages go out when memory is short.
STAGED_BYTES = 64 << 20


def pages_of(tokens: int) -> int:
    """Pages that `tokens` positions take."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Which of the pages 0..count-1 are in use, and by how many holders. A page is free when all have released it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, for one holder. ValueError when there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for, {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a holder to pages in use. They must not be written any more."""
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def alone(self, pages: Sequence[int]) -> int:
        """How many of these have one holder, and would be free without it."""
        return sum(self._holders[page] == 1 for page in pages)


#: A copy of some pages of every layer, outside of the pool.
Saved = list[Tensor]


class KVCache:
    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        values_within: int = 0,
        mixture_layers: int = 0,
        choices: int = 0,
        groups: Sequence[Sequence[int]] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`groups`: layers that have pages of their own, group by group; of layers in none nothing is kept. By default
        all layers are one group."""
        self.pages, self.kv_heads = pages, kv_heads
        groups = groups or [range(layers)]
        #: By layer: the group that it is in, if it has keys and values.
        self.group_of = {layer: group for group, own in enumerate(groups) for layer in own}
        self.groups, self._own = len(groups), list(groups[0])
        place = {layer: at for own in groups for at, layer in enumerate(own)}
        #: An extra page that no sequence holds: unused rows of a captured step write to it.
        self.scratch = pages
        where = torch.device(device)
        keys = [zeros((pages + 1, kv_heads, head_dim, PAGE_TOKENS), dtype, where) for _ in self._own]
        values = [
            keys_NKDP[:, :, :values_within].transpose(2, 3)
            if values_within
            else zeros((pages + 1, kv_heads, PAGE_TOKENS, head_dim), dtype, where)
            for keys_NKDP in keys
        ]
        none = torch.empty(pages + 1, 0, head_dim, PAGE_TOKENS, dtype=dtype, device=where)
        self.k_NKDP = [keys[place[i]] if i in place else none for i in range(layers)]
        self.v_NKPD = [values[place[i]] if i in place else none.transpose(2, 3) for i in range(layers)]
        self.latent = values_within > 0
        self.routes_NPMC = zeros((pages, PAGE_TOKENS, mixture_layers, choices), torch.int16, torch.device(device))

    @property
    def device(self) -> torch.device:
        return self.k_NKDP[0].device

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each once."""
        keys, values = ([pool[layer] for layer in self._own] for pool in (self.k_NKDP, self.v_NKPD))
        return [*keys, *([] if self.latent else values), self.routes_NPMC]

    def write(self, layer: int, pages: Sequence[int], start: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values of consecutive positions in these pages; `start`, counted from the first of them, is
        the first of a page."""
        pools = (self.k_NKDP[layer].transpose(2, 3), k_TKD), (self.v_NKPD[layer], v_TKD)
        whole, rest = divmod(k_TKD.shape[0], PAGE_TOKENS)
        first = start // PAGE_TOKENS
        mine_N = torch.tensor(pages[first : first + whole], device=self.device)
        for pool_NKPD, new_TKD in pools:
            if whole:
                new_NPKD = new_TKD[: whole * PAGE_TOKENS].view(whole, PAGE_TOKENS, *new_TKD.shape[1:])
                pool_NKPD[mine_N] = new_NPKD.transpose(1, 2)
            if rest:
                pool_NKPD[pages[first + whole], :, :rest] = new_TKD[whole * PAGE_TOKENS :].transpose(0, 1)

    def read(self, layer: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """A copy of the first `length` positions in these pages, rounded up to whole pages: keys [K, D, L] and values
        [K, L, D]."""
        mine_N = torch.tensor(pages[: pages_of(length)], device=self.device)
        k_KDNP = self.k_NKDP[layer].index_select(0, mine_N).permute(1, 2, 0, 3)
        v_KNPD = self.v_NKPD[layer].index_select(0, mine_N).transpose(0, 1)
        return k_KDNP.flatten(2), v_KNPD.flatten(1, 2)

    def record_routes(self, pages: Sequence[int], positions: Sequence[int], chosen: Sequence[Tensor]) -> None:
        """Store the experts [T, C] chosen in each mixture layer, for positions in these pages, one page for each."""
        offsets = sent(torch.tensor([position % PAGE_TOKENS for position in positions]), self.device)
        pages_T = sent(torch.tensor(pages), self.device)
        self.routes_NPMC[pages_T, offsets] = torch.stack(list(chosen), 1).to(torch.int16)

    def routes(self, pages: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """The recorded experts of the first `length` positions of a sequence: [L, M, C]."""
        return routes_of(self.routes_NPMC[torch.tensor(pages[: pages_of(length)], device=self.device)], length)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second."""
        copy_pages(self.tensors, self.tensors, pairs)

    def take_out(self, pages: Sequence[int]) -> Saved:
        """A copy of these pages in the host's memory."""
        if in_one_launch(self.device):
            saved = [torch.empty((len(pages), *pool.shape[1:]), dtype=pool.dtype) for pool in self.tensors]
            for first, some in self._staged(pages):
                flat = torch.empty(self._bytes_of(len(some)), dtype=torch.uint8, device=self.device)
                copy_pages(self.tensors, self._parted(flat, len(some)), [(page, at) for at, page in enumerate(some)])
                for own, part in zip(saved, self._parted(flat.cpu(), len(some)), strict=True):
                    own[first : first + len(some)] = part
            return saved
        mine_N = torch.tensor(pages, device=self.device)
        return [pool.index_select(0, mine_N).cpu() for pool in self.tensors]

    def bring_in(self, pages: Sequence[int], saved: Saved) -> None:
        """Put a copy from `take_out` into the first of these pages."""
        if in_one_launch(self.device):
            for first, some in self._staged(pages[: len(saved[0])]):
                parts = [own[first : first + len(some)].reshape(-1).view(torch.uint8) for own in saved]
                flat = sent(torch.cat(parts), self.device)
                copy_pages(self._parted(flat, len(some)), self.tensors, [*enumerate(some)])
            return
        mine_N = torch.tensor(pages[: len(saved[0])], device=self.device)
        for pool, own in zip(self.tensors, saved, strict=True):
            pool[mine_N] = own.to(self.device)

    def clear_from(self, pages: Sequence[int], position: int) -> None:
        """Clear the positions from this one on, counted from the first of these pages."""
        page, rest = divmod(position, PAGE_TOKENS)
        self.clear(pages[page + 1 :])
        for layer in self._own if page < len(pages) else ():
            self.k_NKDP[layer][pages[page], :, :, rest:] = 0
            self.v_NKPD[layer][pages[page], :, rest:] = 0

    def _staged(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """The pages in parts of at most STAGED_BYTES, each with the index of its first page."""
        most = max(1, STAGED_BYTES // self._bytes_of(1))
        return ((first, pages[first : first + most]) for first in range(0, len(pages), most))

    def _bytes_of(self, pages: int) -> int:
        return sum(pages * pool[0].nbytes for pool in self.tensors)

    def _parted(self, flat: Tensor, pages: int) -> Saved:
        """The tensors' shares of a buffer in which this many pages of each lie one after another."""
        parts = flat.split_with_sizes([pages * pool[0].nbytes for pool in self.tensors])
        pairs = zip(parts, self.tensors, strict=True)
        return [part.view(pool.dtype).view(pages, *pool.shape[1:]) for part, pool in pairs]

    def clear(self, pages: Sequence[int]) -> None:
        for pool in self.tensors:
            pool[list(pages)] = 0


def in_one_launch(device: torch.device) -> bool:
    """Whether one launch copies the pages of all layers; on a CPU a call for each tensor is as fast."""
    return device.type == "cuda"


def copy_pages(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """target[b] = source[a] for each pair (a, b), in every source and its target. A page may be the source of several
    pairs, but a target is in no other pair."""
    if in_one_launch(sources[0].device):
        from workers.generator.gpu import pages  # Triton: only a GPU needs it

        pages.copy_pages(sources, targets, pairs)
        return
    for source, target in zip(sources, targets, strict=True):
        for a, b in pairs:
            target[b] = source[a]


def routes_of(routes_NPMC: Tensor, length: int) -> npt.NDArray[np.int64]:
    """The routes of the first `length` positions in these pages: [L, M, C]."""
    found: npt.NDArray[np.int64] = routes_NPMC.flatten(0, 1)[:length].to(torch.int64).cpu().numpy()
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU they begin at a cache line, in memory that the system only provides when it is touched
    (torch.zeros touches all of it)."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + 63, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
