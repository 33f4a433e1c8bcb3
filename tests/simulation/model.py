"""What a request must look like, in a few lists: the reference that the manager is compared with.

Rule: no tree, no pages, no eviction. A prefix is known by its *chain value*, a hash of its scope and of all its tokens; what the
engine writes at a position is the chain value of the prefix that ends there, so bytes can be told right or wrong wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Token = int | bytes


@dataclass(frozen=True)
class Kind:
    """A life cycle: full attention, a window with or without sinks, or recurrent."""

    window: int | None = None
    sink_blocks: int = 0
    recurrent: bool = False

    def __str__(self) -> str:
        if self.recurrent:
            return "ssm"
        if self.window is None:
            return "full"
        return f"window {self.window}" + (f" behind {self.sink_blocks} sinks" if self.sink_blocks else "")

    def stale(self, size: int, history: int) -> range:
        """Blocks that no query at `history` or later reads."""
        if self.window is None:
            return range(0)
        beg = min(-(-history // size), self.sink_blocks)
        return range(beg, max(beg, (history + 1 - self.window) // size))

    def scratch(self, size: int, history: int, capacity: int, max_rewind: int) -> range:
        """Blocks of a step up to `capacity` that only the step itself reads."""
        stale = self.stale(size, max(0, capacity - max_rewind))
        beg = max(stale.start, -(-history // size))
        return range(beg, max(beg, min(stale.stop, -(-capacity // size))))


def chain(value: int, token: Token) -> int:
    """The chain value of a prefix with one more token; equal in every run and on every build."""
    return hash((value, token if isinstance(token, int) else int.from_bytes(token, "big") + (1 << 300)))


def chain_all(value: int, tokens: Sequence[Token]) -> list[int]:
    values: list[int] = []
    for token in tokens:
        value = chain(value, token)
        values.append(value)
    return values


class Library:
    """Which prefixes were ever committed: an upper bound of what can be reused."""

    def __init__(self, num_scopes: int) -> None:
        self.roots = [hash((7919, scope)) for scope in range(num_scopes)]
        self.committed: set[int] = set()

    def commit(self, values: Sequence[int]) -> None:
        self.committed.update(values)

    def longest(self, scope: int, tokens: Sequence[Token]) -> int:
        value = self.roots[scope]
        for position, token in enumerate(tokens):
            value = chain(value, token)
            if value not in self.committed:
                return position
        return len(tokens)

    def clear(self) -> None:
        self.committed.clear()


class Beam:
    """One continuation: its tokens, and what the engine has written for each."""

    def __init__(self, tokens: list[Token], stamps: list[int], state: list[int], shared: int = 0) -> None:
        self.tokens = tokens
        self.stamps = stamps  # chain values, by position
        self.state = state  # the stamps that its recurrent state was computed from
        self.shared = shared  # leading blocks that it shares with beam 0; 0 for beam 0 itself

    def copy(self) -> Beam:
        return Beam(self.tokens.copy(), self.stamps.copy(), self.state)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        del self.stamps[length:]


class Request:
    """What is known about one request."""

    def __init__(self, scope: int, root: int, size: int, kinds: list[Kind]) -> None:
        self.scope = scope
        self.root = root  # chain value of the empty prefix
        self.size = size
        self.kinds = kinds
        self.recurrent = any(kind.recurrent for kind in kinds)
        self.status = "SUSPENDED"
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self.beams = [Beam([], [], [])]
        self.tail_beam = -1  # beam whose tokens are committed in the last, partial block; -1 if all beams share them
        self.last_beam = 0  # beam that the last committed token came from
        self.committing = True
        self.ended = False  # nothing may be written any more
        self.pageless: set[tuple[int, int]] = set()  # (life cycle, block) that lay in scratch: it has no page
        self.scratch = False

    @property
    def computed(self) -> int:
        """Positions that hold what the engine wrote."""
        return len(self.beams[0].tokens)

    @property
    def width(self) -> int:
        return len(self.beams)

    @property
    def blocks(self) -> int:
        return -(-self.capacity // self.size)

    @property
    def full(self) -> int:
        """Full committed blocks."""
        return self.committed // self.size

    def start(self, tokens: Sequence[Token], matched: int) -> None:
        """Created with this many tokens reused."""
        self.committed = self.history = self.capacity = matched
        stamps = chain_all(self.root, tokens[:matched])
        self.beams = [Beam(list(tokens[:matched]), stamps, stamps.copy())]

    def resized(self, capacity: int, history: int, max_rewind: int) -> None:
        moved = capacity != self.capacity or history != self.history
        for beam in self.beams:
            beam.cut(capacity)
        if self.scratch and moved:
            for beam in self.beams:
                beam.cut(max(history, self.committed))
            for number, kind in enumerate(self.kinds):
                for block in kind.scratch(self.size, history, capacity, max_rewind):
                    self.pageless.add((number, block))
        blocks = -(-capacity // self.size)
        self.pageless = {item for item in self.pageless if item[1] < blocks}
        for number, kind in enumerate(self.kinds):  # never allocated: stale before they were reached
            for block in kind.stale(self.size, history):
                if self.blocks <= block < blocks:
                    self.pageless.add((number, block))
        self.capacity = capacity
        self.history = history
        if capacity < self.committed:
            self.committed = history  # what is committed ahead is taken back

    def clean_run(self, number: int) -> int:
        """How many tokens of a beam may be committed next: those that it computed on top of exactly what is committed."""
        if self.tail_beam not in (-1, number):
            return 0
        beam = self.beams[number]
        beg = self.full * self.size
        if beam.stamps[beg : self.committed] != self.beams[max(self.tail_beam, 0)].stamps[beg : self.committed]:
            return 0
        value = beam.stamps[self.committed - 1] if self.committed else self.root
        end = self.committed
        while end < self.computed and chain(value, beam.tokens[end]) == beam.stamps[end]:
            value = beam.stamps[end]
            end += 1
        return end - self.committed

    def commit(self, number: int, count: int) -> list[int]:
        """Tokens of one beam become final; their chain values."""
        beam = self.beams[number]
        beg, end = self.committed, self.committed + count
        values = beam.stamps[beg:end]
        full = end // self.size
        for block in range(self.full, full):
            part = slice(block * self.size, (block + 1) * self.size)
            self.beams[0].tokens[part] = beam.tokens[part]
            self.beams[0].stamps[part] = beam.stamps[part]
        self.committed = end
        self.history = max(self.history, end)
        for other in self.beams[1:]:
            other.shared = max(other.shared, full)
        self._share()
        if self.width > 1:
            self.tail_beam = number if end % self.size else -1
            self.last_beam = number
        return values

    def _share(self) -> None:
        """Further beams read what beam 0 has in the blocks that they share."""
        for beam in self.beams[1:]:
            part = slice(0, min(beam.shared * self.size, self.computed))
            beam.tokens[part] = self.beams[0].tokens[part]
            beam.stamps[part] = self.beams[0].stamps[part]

    def settle_tail(self) -> None:
        """Before the last, partial block is published, the beam whose tokens it has committed becomes beam 0."""
        if self.tail_beam > 0:
            self.exchange(self.tail_beam)

    def exchange(self, number: int) -> None:
        """Beam 0 and another one swap all that is not full and not shared."""
        first, other = self.beams[0], self.beams[number]
        beg = max(self.full, other.shared) * self.size
        first.tokens[beg:], other.tokens[beg:] = other.tokens[beg:], first.tokens[beg:]
        first.stamps[beg:], other.stamps[beg:] = other.stamps[beg:], first.stamps[beg:]
        first.state, other.state = other.state, first.state
        if self.tail_beam == number:
            self.tail_beam = 0
        self.last_beam = 0
        self._share()

    def widen(self, width: int) -> None:
        for beam in self.beams:
            beam.cut(self.history)
        while self.width < width:
            self.beams.append(self.beams[0].copy())
            self.beams[-1].shared = self.history // self.size

    def narrow(self, width: int) -> None:
        if self.last_beam >= width:
            self.exchange(self.last_beam)
        del self.beams[width:]
        if width == 1:
            self.tail_beam = -1
            self.last_beam = 0

    def fork(self) -> Request:
        twin = Request(self.scope, self.root, self.size, self.kinds)
        twin.committed, twin.history, twin.capacity = self.committed, self.history, self.history
        twin.beams = [self.beams[self.last_beam].copy()]
        twin.beams[0].cut(self.history)
        twin.committing = self.committing
        twin.scratch = self.scratch
        twin.pageless = {item for item in self.pageless if item[1] < twin.blocks}
        return twin

    def reads_scratch(self, history: int | None = None) -> bool:
        """Whether the next query at a history, by default the present one, reads or writes a block that was written to scratch."""
        at = self.history if history is None else history
        blocks = -(-at // self.size)
        return self.scratch and any(
            block < blocks and block not in self.kinds[number].stale(self.size, at) for number, block in self.pageless
        )

    def has_page(self, number: int, block: int) -> bool:
        """Whether a running request has a page of its own for a block, as beam 0 sees it."""
        if (number, block) in self.pageless:
            return False
        return block not in self.kinds[number].stale(self.size, self.history)
