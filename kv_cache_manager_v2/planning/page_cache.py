"""What a cache of one size finds for a model with several kinds of layers, whose pages share the slots.

What such a request computes, and so which pages it leaves, depends on what it finds: pages of windows and states before a hit are
not made again. So a larger cache does not keep all that a smaller one keeps, and no single pass gives all sizes. This simulates one
size: pages by age, without tokens, a tree or a device. The rules are those of the manager:

- A hit of n tokens needs the pages of full attention of all n, the pages that the next query sees of a window and its sinks, and a
  state after exactly n tokens.
- A request takes slots for all blocks that it computes, and one for its state. It drops the oldest pages of other requests for
  them. A request for which that is not enough is skipped.
- Pages that have left a window age from the end of the prefill on, all others from the end of the request, the last block first.
- A state is copied when tokens are committed. It ages from then on, and a hit that starts from it makes it young again.
"""

from __future__ import annotations

from typing import Final

ABSENT: Final = -1
IN_USE: Final = 1 << 60
KINDS: Final = 3
FULL: Final = 0
WINDOW: Final = 1
STATE: Final = 2


class LayerMix:
    """The kinds of layers of a model: each is there or not."""

    def __init__(self, full: bool, window: int | None, sinks: int, snapshot_every: int | None) -> None:
        self.full = full
        self.window = window  # tokens; None: no windowed layers
        self.sinks = sinks  # tokens before the window that every query sees
        self.snapshot_every = snapshot_every  # tokens between two copies of the state; None: no recurrent layers
        self.num_kinds = int(full) + int(window is not None) + int(snapshot_every is not None)


class PageCache:
    """A cache of `capacity` blocks, each with a page for each kind of layers. O(pages of its path) for each request."""

    def __init__(self, mix: LayerMix, num_prefixes: int, tokens_per_block: int, units_per_block: int, capacity: int) -> None:
        self._mix = mix
        self._size = tokens_per_block
        self._units = units_per_block
        self._window = 0 if mix.window is None else mix.window
        self._has_window = mix.window is not None
        self._has_state = mix.snapshot_every is not None
        self._num_attention = int(mix.full) + int(self._has_window)
        self._first = -(-mix.sinks // tokens_per_block)  # blocks with sinks
        self._num_slots = capacity * mix.num_kinds
        self._used = 0  # slots
        self._age = [ABSENT] * (num_prefixes * KINDS)  # by page: its position in the queue, or ABSENT or IN_USE
        self._known = [0] * num_prefixes  # by prefix: the most tokens of its block that were ever cached
        self._position = [0] * num_prefixes  # by prefix: tokens after which its state was copied
        self._holder = [ABSENT] * num_prefixes if units_per_block > 1 else []  # by prefix: the last block computed that begins so
        self._queue: list[int] = []  # pages by age; a page has moved on if its age is another one
        self._oldest = 0  # position in the queue
        self.most_used = 0  # slots

    def run(self, units: list[int], num_tokens: int) -> int:
        """Serve a request whose path has these prefixes (see `PrefixTree`). Returns the hit tokens, or -1 if it is skipped."""
        path = units if self._units == 1 else units[self._units - 1 :: self._units]
        if len(path) * self._units < len(units):
            path.append(units[len(units) - 1])  # a partly filled block
        hit, num_hit = self._match(path, units, num_tokens)
        in_use = self._use(path, num_hit, hit)
        needed = (len(path) - num_hit) * self._num_attention + int(self._has_state)
        if in_use + needed > self._num_slots:
            self._end(path, num_hit, 0, 0)
            return -1
        while self._used + needed > self._num_slots:
            self._drop()
        self._used += needed
        self.most_used = max(self.most_used, self._used)
        self._compute(path, num_hit, num_tokens)
        for position in range(num_hit * self._units, len(units) if self._units > 1 else 0):
            self._holder[units[position]] = path[position // self._units]
        if self._has_state:
            self._copy_states(path, hit, num_tokens)
            self._used -= 1  # its own state
        self._end(path, len(path), self._first, self._stale_end(num_tokens))
        return hit

    # --- look-up

    def _stale_end(self, num_tokens: int) -> int:
        """The first block of the window of a query after so many tokens. Blocks from the sinks up to it are not needed."""
        return max(self._first, (num_tokens + 1 - self._window) // self._size) if self._has_window else self._first

    def _match(self, path: list[int], units: list[int], num_tokens: int) -> tuple[int, int]:
        """The most first tokens of which all is there that the next query reads, and the blocks that need not be computed."""
        age, size = self._age, self._size
        hit = num_whole = 0
        unbroken = 0  # the first block of those up to the present one that all have their window's pages
        for block, prefix in enumerate(path):
            page = prefix * KINDS
            known = min(self._known[prefix], num_tokens - block * size, size)
            if known <= 0 or (self._mix.full and age[page + FULL] == ABSENT):
                break
            end = block * size + known
            if self._has_window:
                if age[page + WINDOW] == ABSENT:
                    if block < self._first:
                        break
                    unbroken = block + 1
                if unbroken <= self._stale_end(end):
                    hit = end
            elif not self._has_state:
                hit = end
            elif age[page + STATE] != ABSENT and self._position[prefix] <= end:
                hit = self._position[prefix]
            if known < size:
                break
            num_whole += 1
        if self._units > 1 and not self._has_state:
            hit = max(hit, self._match_part(units, num_whole, unbroken))
        return hit, len(path) if hit == num_tokens else hit // size

    def _match_part(self, units: list[int], block: int, unbroken: int) -> int:
        """As `_match`, where the match ends within a block: with another one that begins in the same way. 0 without one."""
        hit = 0
        per_block = self._units
        for position in range(block * per_block, min((block + 1) * per_block, len(units)) - 1):
            page = self._holder[units[position]] * KINDS
            if page < 0 or (self._mix.full and self._age[page + FULL] == ABSENT):
                break
            if self._has_window and self._age[page + WINDOW] == ABSENT:
                break
            end = (position + 1) * self._size // per_block
            if not self._has_window or unbroken <= self._stale_end(end):
                hit = end
        return hit

    def _use(self, path: list[int], num_hit: int, hit: int) -> int:
        """Use the pages of a hit. Returns the slots in use. A state is only read."""
        in_use = 0
        stale_end = self._stale_end(hit)
        for block in range(num_hit):
            page = path[block] * KINDS
            if self._mix.full:
                self._age[page + FULL] = IN_USE
                in_use += 1
            if self._has_window and not self._first <= block < stale_end:
                self._age[page + WINDOW] = IN_USE
                in_use += 1
        if self._has_state and hit > 0:
            self._enqueue(path[(hit - 1) // self._size] * KINDS + STATE)
        return in_use

    # --- computing

    def _compute(self, path: list[int], num_hit: int, num_tokens: int) -> None:
        """Commit the blocks after the hit. Where a page is cached all the same, the request's own one is given back."""
        age, known, size = self._age, self._known, self._size
        full, window = self._mix.full, self._has_window
        for block in range(num_hit, len(path)):
            prefix = path[block]
            page = prefix * KINDS
            if full:
                if age[page + FULL] != ABSENT:
                    self._used -= 1
                age[page + FULL] = IN_USE
            if window:
                if age[page + WINDOW] != ABSENT:
                    self._used -= 1
                age[page + WINDOW] = IN_USE
            known[prefix] = max(known[prefix], min(size, num_tokens - block * size))

    def _copy_states(self, path: list[int], hit: int, num_tokens: int) -> None:
        """Keep copies of the state at each multiple of `snapshot_every` tokens after the hit, and at the end."""
        every = self._mix.snapshot_every
        assert every is not None
        position = hit
        while position < num_tokens:
            position = min((position // every + 1) * every, num_tokens)
            prefix = path[(position - 1) // self._size]
            page = prefix * KINDS + STATE
            if self._age[page] == ABSENT:
                if self._used >= self._num_slots and not self._drop():
                    continue  # no slot: this copy is left out
                self._used += 1
            self._position[prefix] = position
            self._enqueue(page)

    # --- ages

    def _end(self, path: list[int], num_blocks: int, stale_beg: int, stale_end: int) -> None:
        """End the use of the pages in use of the first blocks: first of those that have left the window, then from the last on."""
        age = self._age
        if self._has_window:
            for block in range(stale_beg, min(stale_end, num_blocks)):
                page = path[block] * KINDS + WINDOW
                if age[page] == IN_USE:
                    self._enqueue(page)
        for block in range(num_blocks - 1, -1, -1):
            page = path[block] * KINDS
            if age[page + FULL] == IN_USE:
                self._enqueue(page + FULL)
            if age[page + WINDOW] == IN_USE:
                self._enqueue(page + WINDOW)

    def _enqueue(self, page: int) -> None:
        """Make a page the youngest."""
        self._age[page] = len(self._queue)
        self._queue.append(page)

    def _drop(self) -> bool:
        """Drop the oldest page. Returns False if all pages are in use."""
        queue, age = self._queue, self._age
        while self._oldest < len(queue):
            page = queue[self._oldest]
            if age[page] == self._oldest:
                age[page] = ABSENT
                self._oldest += 1
                self._used -= 1
                return True
            self._oldest += 1
        return False
