"""The tree and the match against their definitions, over random trees with holes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.tokens import pack, unpack
from kv_cache_manager_v2.reuse.tree import BLOCK_COVERED, BLOCK_EXISTS, BLOCK_NEW
from tests.reuse.model import Model, Path
from tests.support.tree_rig import EMPTY_SCOPE, FULL, SSM, Cache, Token, chunked, digest, window

HOW = {BLOCK_NEW: "new", BLOCK_EXISTS: "exists", BLOCK_COVERED: "covered"}
TOKENS: list[Token] = [1, 2, digest(1), digest(2)]
KINDS = [
    (FULL,),
    (window(1),),
    (window(3),),
    (window(4, 1),),
    (SSM,),
    (FULL, window(1)),
    (FULL, window(2), window(5)),
    (window(3, 2), window(7)),
    (FULL, SSM),
    (SSM, FULL, SSM),
    (SSM, window(3, 1)),
    (FULL, window(4), SSM),
    (chunked(3),),
    (FULL, chunked(4)),
    (window(3), chunked(6), SSM),
]


def blocks_of(cache: Cache) -> dict[Path, Block]:
    """The tree's blocks by all their tokens from the start."""
    result: dict[Path, Block] = {}
    for block in cache.tree.all_blocks():
        path: list[Token] = []
        node: Block | None = block
        while node is not None:
            path[:0] = unpack(node.tokens)
            node = node.parent
        result[tuple(path)] = block
    return result


def assert_same_blocks(cache: Cache, model: Model) -> None:
    cache.tree.check_invariants()
    found = blocks_of(cache)
    assert {path: [page.coverage if page else 0 for page in block.pages] for path, block in found.items()} == model.blocks


class Pair:
    """The same operations on the tree and on the model."""

    def __init__(self, size: int, kinds: tuple[tuple[str, int, int], ...]) -> None:
        self.cache = Cache(size, *kinds)
        self.model = Model(self.cache.life_cycles, size)
        self.pinned: list[tuple[Path, Block]] = []

    def commit(self, tokens: Path, data: st.DataObject) -> None:
        """A request's blocks, each with whatever pages the data says."""
        size = self.model.size
        node = self.cache.tree.root(EMPTY_SCOPE)
        for end in range(size, len(tokens) + size, size):
            path = tokens[:end]
            part = pack(list(path[end - size :]))
            node, how = self.cache.tree.insert(node, part.data, part.num_tokens)
            assert HOW[how] == self.model.insert(path)
            if how == BLOCK_COVERED:
                break
            for life_cycle in self.cache.life_cycles:
                full = data.draw(st.integers(0, 4), label="share of pages")
                coverage = part.num_tokens if full else data.draw(st.integers(0, part.num_tokens), label="coverage")
                if coverage:
                    took = self.cache.give(node, life_cycle.index, coverage) is not None
                    assert took == self.model.install(path, life_cycle.index, coverage)

    def lose(self, number: int) -> None:
        """Evict one of the pages that there are."""
        pages = [
            (path, block, i)
            for path, block in sorted(blocks_of(self.cache).items(), key=repr)
            for i, page in enumerate(block.pages)
            if page is not None
        ]
        if pages:
            path, block, i = pages[number % len(pages)]
            self.model.lose(path, i)
            self.cache.lose(block, i)

    def pin(self, number: int) -> None:
        blocks = [
            (path, block) for path, block in sorted(blocks_of(self.cache).items(), key=repr) if not len(path) % self.model.size
        ]
        if blocks:
            path, block = blocks[number % len(blocks)]
            self.cache.tree.pin(block)
            self.model.pins[path] = self.model.pins.get(path, 0) + 1
            self.pinned.append((path, block))

    def unpin(self, number: int) -> None:
        if self.pinned:
            path, block = self.pinned.pop(number % len(self.pinned))
            attached = block.attached
            self.cache.tree.unpin(block)
            if attached:
                self.model.pins[path] -= 1
                self.model.prune(path)

    def compare(self, query: Path, partial: bool, backoff: int) -> None:
        found = self.cache.match(query, partial, backoff)
        assert found.num_tokens == self.model.match(query, partial, backoff)
        assert found.divergence == self.model.longest(query, partial)
        assert found.before_hybrid == self.model.match(query, partial, backoff, snapshots=False)
        assert found.num_lookup_tokens == len(query)
        held: list[Token] = []
        for block in found.blocks:
            held.extend(unpack(block.tokens))
        assert tuple(held[: found.num_tokens]) == query[: found.num_tokens]
        assert len(found.blocks) == -(-found.num_tokens // self.model.size)
        for ordinal, block in enumerate(found.blocks):
            share = min(self.model.size, found.num_tokens - ordinal * self.model.size)
            for life_cycle in self.cache.life_cycles:
                page = block.pages[life_cycle.index]
                coverage = 0 if page is None else page.coverage
                beg, end = life_cycle.stale(found.num_tokens)
                if not life_cycle.is_attention:
                    if ordinal == len(found.blocks) - 1:
                        assert coverage == share
                elif not beg <= ordinal < end:
                    assert coverage >= share


prompts: st.SearchStrategy[Path] = st.lists(st.sampled_from(TOKENS[:2] * 4 + TOKENS[2:]), min_size=1, max_size=14).map(tuple)


@settings(max_examples=150)
@given(st.data(), st.integers(1, 5), st.sampled_from(KINDS))
def test_tree_and_match_follow_their_definitions(data: st.DataObject, size: int, kinds: tuple[tuple[str, int, int], ...]) -> None:
    """After any commits, losses, pins and unpins the tree holds what the model holds, and every query matches alike."""
    pair = Pair(size, kinds)
    for _step in range(data.draw(st.integers(1, 10), label="steps")):
        action = data.draw(st.sampled_from(["commit", "commit", "commit", "lose", "lose", "pin", "unpin"]), label="action")
        if action == "commit":
            pair.commit(data.draw(prompts, label="tokens"), data)
        else:
            number = data.draw(st.integers(0, 60), label="which")
            {"lose": pair.lose, "pin": pair.pin, "unpin": pair.unpin}[action](number)
        assert_same_blocks(pair.cache, pair.model)
    known = sorted(pair.model.blocks, key=repr)
    for _query in range(8):
        query = data.draw(prompts, label="query")
        near = data.draw(st.booleans(), label="near")
        if near and known:
            base = known[data.draw(st.integers(0, len(known) - 1), label="base")]
            query = base[: data.draw(st.integers(0, len(base)), label="kept")] + query
        partial = data.draw(st.booleans(), label="partial")
        pair.compare(query, partial, data.draw(st.sampled_from([0, 0, 1, 2, 5]), label="backoff"))
    pair.cache.tree.clear()
    pair.cache.tree.check_invariants()
    assert pair.cache.tree.num_blocks == 0
