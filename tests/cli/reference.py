"""What may be reused, in dicts of tuples: no tree, no hashes, nothing of the package.

The first n tokens of a prompt have a *name*: (the trace's block ids that they touch, n). Equal names, equal tokens; a shorter
beginning's name follows from a longer one's. A block of the cache is known by the name of everything up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.cli.helpers import Prompt

Name = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Kind:
    """A kind of layer; `window` None: full attention."""

    name: str
    window: int | None = None
    sinks: int = 0
    recurrent: bool = False

    def reads(self, ordinal: int, num_tokens: int, block: int) -> bool:
        """Whether a query after `num_tokens` tokens reads the page of this block: a state only where the tokens end."""
        if self.recurrent:
            return ordinal == (num_tokens - 1) // block
        if self.window is None or ordinal < -(-self.sinks // block):
            return True
        return (ordinal + 1) * block > num_tokens + 1 - self.window  # its last token is in the window


class Reference:
    """Which blocks have which pages, and what that allows."""

    def __init__(self, kinds: Sequence[Kind], block: int, trace_block: int) -> None:
        self.kinds = kinds
        self.block = block  # tokens a block of the cache
        self.trace_block = trace_block  # tokens an id stands for
        self.pages: dict[Name, dict[str, int]] = {}  # block -> kind -> tokens covered, for a state exactly how many
        self.children: dict[Name, list[Name]] = {}  # what a block goes on with; the first blocks go on from ((), 0)

    def begin(self, name: Name, num_tokens: int) -> Name:
        """The name of the first tokens of something named."""
        return name[0][: -(-num_tokens // self.trace_block)], num_tokens

    def parent(self, name: Name) -> Name:
        return self.begin(name, (name[1] - 1) // self.block * self.block)

    def put(self, name: Name, pages: dict[str, int]) -> None:
        """A block with its pages; it must be new."""
        self.pages[name] = pages
        self.children.setdefault(self.parent(name), []).append(name)

    def commit(self, prompt: Prompt, num_tokens: int) -> None:
        """The first tokens of a prompt are computed, and a state stands at their end. Nothing is ever dropped."""
        whole = (prompt.ids, prompt.length)
        for beg in range(0, num_tokens, self.block):
            end = min(beg + self.block, num_tokens)
            pages = self._block(self.begin(whole, end))
            for kind in self.kinds:
                if not kind.recurrent or end == num_tokens:
                    pages[kind.name] = max(pages.get(kind.name, 0), end - beg)

    def _block(self, name: Name) -> dict[str, int]:
        """The pages of the block that holds these tokens: one that goes on, or a new one, which takes over from a beginning."""
        siblings = self.children.get(self.parent(name), [])
        for other in siblings:
            if other[1] >= name[1] and self.begin(other, name[1]) == name:
                return self.pages[other]
        taken: dict[str, int] = {}
        for other in siblings:
            if other[1] < name[1] and self.begin(name, other[1]) == other:
                taken = self.pages.pop(other)
                siblings.remove(other)
                break
        self.put(name, taken)
        return taken

    def match(self, prompt: Prompt) -> int:
        """The largest number of first tokens of which everything is there that the next query reads."""
        whole = (prompt.ids, prompt.length)
        num_tokens = prompt.length
        while num_tokens > 0:
            name = self.begin(whole, num_tokens)
            if self.parent(name) not in self.children:
                num_tokens = self.parent(name)[1]  # no block there at all
            elif self._usable(name):
                return num_tokens
            else:
                num_tokens -= 1
        return 0

    def _usable(self, name: Name) -> bool:
        num_tokens = name[1]
        last = (num_tokens - 1) // self.block
        share = num_tokens - last * self.block
        ends = [other for other in self.children[self.parent(name)] if self.begin(other, num_tokens) == name]
        if not any(self._has(self.pages[other], last, share, num_tokens) for other in ends if other[1] >= num_tokens):
            return False
        for ordinal in range(last):
            pages = self.pages.get(self.begin(name, (ordinal + 1) * self.block))
            if pages is None or not self._has(pages, ordinal, self.block, num_tokens):
                return False
        return True

    def _has(self, pages: dict[str, int], ordinal: int, share: int, num_tokens: int) -> bool:
        """Whether a block has what a query after `num_tokens` tokens reads of its first `share` tokens."""
        for kind in self.kinds:
            if kind.reads(ordinal, num_tokens, self.block):
                covered = pages.get(kind.name, 0)
                if covered != share if kind.recurrent else covered < share:
                    return False
        return True

    def loaded(self, num_tokens: int) -> dict[str, int]:
        """Pages that a hit of so many tokens loads, by kind."""
        blocks = range(-(-num_tokens // self.block))
        return {kind.name: sum(kind.reads(ordinal, num_tokens, self.block) for ordinal in blocks) for kind in self.kinds}
