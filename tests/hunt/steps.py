"""The kernels of one step: which positions it may read, where they lie, what it writes."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2 import BAD_PAGE_INDEX, LogicError, PageIndexMode, ScratchDesc
from tests.hunt.base import Base, Found
from tests.hunt.memory import GroupMemory, Piece, Step, Text, pieces
from tests.hunt.requests import Request
from tests.hunt.setups import WORD


class Steps(Base):
    """The kernels of a step."""

    def step(self, request: Request, count: int, received: bool = False) -> None:
        """Queue the kernels of one step on the request's stream: compare what it may read, write `count` positions per beam."""
        tpb = self.tpb
        written = request.written
        rows: dict[tuple[int, int], Sequence[int]] = {}
        prompt = request.prompt[:count]
        new = prompt + self._tokens(count - len(prompt))
        request.prompt = request.prompt[count:]
        garbage = bytes([int(self.rng.random() * 256)]) * (WORD * tpb)
        stop = -(-(written + count) // tpb) * tpb
        for beam, text in enumerate(request.texts):
            if beam:
                new = self._tokens(count)
            text.extend(new)
            step = Step(f"request {request.number} beam {beam} at {written}", request.mismatches.append)
            reads: list[Piece] = []
            writes: list[Piece] = []
            for memory in self.memory:
                index = memory.index
                if memory.group.ssm:
                    if count or written:
                        self._state_pieces(request, beam, memory, text, reads, writes, count, received)
                    continue
                row = self._row(request, index, beam, rows)
                if not received:
                    self._readable(memory, row, text, written, reads, request)
                if count:
                    words = text.words[index] + garbage
                    desc = request.cache.get_scratch_desc(index) if self.setup.scratch_rewind is not None else None
                    if desc:
                        self._scratch_phases(step, memory, row, desc, words, written, stop)
                    else:
                        writes += pieces(memory, row, words, written, stop, tpb)
            step.phases.insert(0, (reads, writes, []))
            if self.disturbed or self.wary:
                self._expect_memory(step)
            assert request.stream is not None
            if self.holding and self.rng.random() < 0.05:
                self.hold(request.stream)
            self.device_call(self.own.launch, request.stream, step)
        request.written += count
        if count or received:
            request.state_at = request.written

    def _expect_memory(self, step: Step) -> None:
        """A page that is handed out has memory: what a real device would report, and this process would die of."""
        addresses = {key: address for memory in self.memory for key, address in memory.addresses.items()}
        for phase in step.phases:
            for pieces_of in phase:
                for view, offset, data in pieces_of:
                    try:
                        self.device.read_bytes(addresses[id(view)] + offset, len(data))
                    except LogicError as error:
                        raise Found(f"a page that was handed out has no memory: {error}") from error

    def _row(self, request: Request, index: int, beam: int, rows: dict[tuple[int, int], Sequence[int]]) -> Sequence[int]:
        row = request.cache.get_base_page_indices(index, beam) if beam else self.pages_of(request, index)
        if request.width > 1:
            if beam:
                main = rows[index, 0]
                row = [row[b] if row[b] != BAD_PAGE_INDEX else main[b] for b in range(request.cache.num_blocks)]
            rows[index, beam] = row
        return row

    def pages_of(self, request: Request, index: int) -> Sequence[int]:
        """The base page indices of the first beam, as the kernel gets them."""
        return request.cache.get_base_page_indices(index)

    def _readable(
        self, memory: GroupMemory, row: Sequence[int], text: Text, written: int, reads: list[Piece], request: Request
    ) -> None:
        """The positions that the next query may read, each of which must have a page."""
        group = memory.group
        words = text.words[memory.index]
        ranges = [(0, written)]
        if group.window is not None:
            first = max(0, written + 1 - group.window)
            sinks = min(group.sinks, first)
            ranges = [(0, sinks), (first, written)] if sinks else [(first, written)]
        tpb = self.tpb
        for beg, end in ranges:
            if end <= beg:
                continue
            for block in range(beg // tpb, (end - 1) // tpb + 1):
                if row[block] == BAD_PAGE_INDEX:
                    raise Found(f"block {block} of {request} in group {memory.index} can be read and has no page: {list(row)}")
            reads += pieces(memory, row, words, beg, end, tpb)

    def _state_pieces(
        self,
        request: Request,
        beam: int,
        memory: GroupMemory,
        text: Text,
        reads: list[Piece],
        writes: list[Piece],
        count: int,
        received: bool,
    ) -> None:
        index = request.cache.get_ssm_block_base_index(memory.index, beam)
        if index == BAD_PAGE_INDEX:
            raise Found(f"{request} has no recurrent state")
        before = text.state(request.state_at, memory.index)
        after = text.state(request.written + count, memory.index)
        for view, per_base, size in memory.buffers:
            at = index * per_base
            for offset in (at, at + size - len(after)):
                if request.state_at and not received:
                    reads.append((view, offset, before))
                if count:
                    writes.append((view, offset, after))

    def _scratch_phases(
        self, step: Step, memory: GroupMemory, row: Sequence[int], desc: ScratchDesc, words: bytearray, beg: int, end: int
    ) -> None:
        """Layer after layer: write all new positions, scratch ones too, and compare them while the layer runs."""
        tpb = self.tpb
        width = WORD * tpb
        for layer in memory.layers:
            found: list[Piece] = []
            for buffer in layer:
                pages = buffer.converter(row, PageIndexMode.PER_LAYER, desc)
                for block in range(beg // tpb, end // tpb):
                    if pages[block] < 0:
                        raise Found(f"block {block} is neither a page nor scratch: {list(row)}, {desc}")
                    first = max(beg, block * tpb)
                    data = bytes(words[first * WORD : (block + 1) * width])
                    at = pages[block] * buffer.stride + (first - block * tpb) * WORD
                    found.append((memory.pool, at, data))
                    found.append((memory.pool, at + buffer.size - width, data))
            step.phases.append(([], found, found))
