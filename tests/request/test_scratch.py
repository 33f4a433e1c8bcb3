"""Scratch reuse: blocks of a long prefill step that fall out of their window within it share a few slots.

Unless said otherwise 32 tokens a block. Ranges are half-open.
"""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, BufferId, CuError, KVCache, LayerId, LogicError, PageIndexMode
from kv_cache_manager_v2.layout.pools import build_layout
from kv_cache_manager_v2.layout.sizing import min_slots
from tests.layout.test_sizing_of_managers import exact, run_batch
from tests.support import inside
from tests.support.models import GRAIN, KEY, KIB, MIB, attention, batch, model
from tests.support.rig import Request, Rig, mixed, toks


def windows(count: int, window: int, rewind: int = 0, gpu: int = 8 * MIB, size: int = 2 * KIB) -> Rig:
    """So many layers of one window, with scratch reuse."""
    return Rig(model([attention(layer, size, window=window) for layer in range(count)], gpu=gpu, scratch_rewind=rewind))


def scratch_held(cache: KVCache) -> bool:
    """Whether the cache has scratch slots."""
    return cache.has_scratch_slots


def span(request: Request, layer: int = 0) -> tuple[int, int]:
    """The scratch range of the layer's group; (0, 0) for none."""
    desc = request.cache.get_scratch_desc(request.rig.group(layer))
    if not desc:
        return 0, 0
    return desc.range.beg, desc.range.end


def test_a_slot_that_leaves_scratch_waits_for_its_last_user() -> None:
    """The producer closes while its stream is blocked at a gate. The consumer's scratch takes its slots, changes its stream, and
    turns a scratch slot into a page: the new stream waits for the gate."""
    config = model([attention(layer, GRAIN // 64, window=32) for layer in range(32)], gpu=2 * MIB, scratch_rewind=0)
    with Rig(config) as rig:
        assert rig.counts().total == 2
        producer = rig.start()
        assert producer.advance(toks(0, 40))
        gate = rig.driver.gate(rig.stream)
        producer.cache.stop_committing()
        producer.write([])
        producer.close()
        between, late = rig.new_stream(), rig.new_stream()
        consumer = rig.start(stream=between)
        assert consumer.cache.resize(64)
        assert span(consumer) == (0, 1)
        consumer.write(toks(100, 164))
        consumer.cache.cuda_stream = late
        assert consumer.cache.resize(96, 64)
        passed: list[int] = []
        rig.driver.launch(late, lambda: passed.append(1))
        assert not passed
        gate.open()
        assert passed == [1]


def test_a_slot_that_becomes_scratch_waits_for_its_last_user() -> None:
    """The slot that the blocked producer frees becomes the consumer's scratch, and its page uses a free slot: the consumer
    waits."""
    config = model([attention(layer, GRAIN // 64, window=32) for layer in range(32)], gpu=2 * MIB, scratch_rewind=0)
    with Rig(config) as rig:
        producer = rig.start()
        assert producer.cache.resize(32)
        gate = rig.driver.gate(rig.stream)
        producer.write(toks(0, 32))
        producer.close()
        stream = rig.new_stream()
        consumer = rig.start(stream=stream)
        assert consumer.cache.resize(64)
        assert span(consumer) == (0, 1)
        passed: list[int] = []
        rig.driver.launch(stream, lambda: passed.append(1))
        assert not passed
        consumer.write(toks(100, 164))
        gate.open()
        assert passed == [1]


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_toggle(schedule: str) -> None:
    """Switching it off while blocks need it raises and changes nothing; off, decode on normal pages, on again for a second
    prompt of 256."""
    layers = [attention(layer, 2 * KIB, window=32) for layer in range(8)]
    with Rig(model(layers, gpu=2 * MIB, scratch_rewind=0), schedule, 5) as rig:
        request = rig.start()
        cache = request.cache
        assert cache.resize(256)
        assert scratch_held(cache)
        with pytest.raises(ValueError, match="scratch blocks are needed"):
            cache.enable_swa_scratch_reuse = False
        assert scratch_held(cache)
        assert cache.enable_swa_scratch_reuse
        request.write(toks(0, 256))
        cache.commit(toks(0, 256))
        assert not scratch_held(cache)
        cache.enable_swa_scratch_reuse = False
        cache.capacity = 257
        request.write(toks(256, 257))
        cache.commit(toks(256, 257))
        request.check()
        assert rig.blocks_mapped(cache)[-1] == 8
        cache.enable_swa_scratch_reuse = True
        assert cache.resize(513, 257)
        assert scratch_held(cache)
        request.write(toks(257, 513))
        cache.commit(toks(257, 513))
        request.check()


def test_a_manager_without_scratch_refuses_it() -> None:
    """enable_swa_scratch_reuse cannot be set where the manager was not configured for it."""
    with Rig(model([attention(0, KIB, window=32)])) as rig:
        cache = rig.create()
        assert not rig.manager.enable_swa_scratch_reuse
        with pytest.raises(ValueError, match="swa_scratch_reuse"):
            cache.enable_swa_scratch_reuse = True
        assert not cache.enable_swa_scratch_reuse


def test_slot_count() -> None:
    """32 layers, window 128, 1024 tokens: blocks 0..27 share ceil(28 / 32) slots and read BAD, 4 have pages; a commit frees the
    scratch; the same prompt again and its first 896 tokens run right."""
    with windows(32, 128, gpu=4 * MIB, size=KIB) as rig:
        tokens = mixed(0, 1024)
        free = rig.counts().free
        request = rig.start()
        cache = request.cache
        assert cache.resize(1024)
        desc = cache.get_scratch_desc(rig.group(0))
        assert desc
        assert (desc.range.beg, desc.range.end, len(desc.slot_ids)) == (0, 28, 1)
        assert rig.blocks_mapped(cache) == [28, 29, 30, 31]
        assert rig.counts().free == free - 5
        assert not cache.supports_index_mode(PageIndexMode.SHARED)
        assert cache.supports_index_mode(PageIndexMode.PER_LAYER)
        request.write(tokens)
        cache.commit(tokens)
        assert not scratch_held(cache)
        assert cache.supports_index_mode(PageIndexMode.SHARED)
        request.check()
        request.close()
        again = rig.start(tokens)
        assert len(again.tokens) == 1024
        again.check()
        prefix = rig.start(tokens[:896])
        prefix.prefill(tokens[:896], 896)
        prefix.check()


@pytest.mark.parametrize(("rewind", "blocks"), [(0, 7), (64, 5)])
def test_scratch_blocks_share_a_slot(rewind: int, blocks: int) -> None:
    """Window 32, 256 tokens: 7 scratch blocks, 5 with a rewind of 64, one slot; the converter gives every layer valid indices,
    none twice."""
    with windows(8, 32, rewind) as rig:
        request = rig.start()
        cache = request.cache
        assert cache.resize(256)
        desc = cache.get_scratch_desc(rig.group(0))
        assert desc is not None
        assert (desc.range.beg, desc.range.end, len(desc.slot_ids)) == (0, blocks, 1)
        base = rig.indices(cache)
        assert [index == BAD_PAGE_INDEX for index in base] == [True] * blocks + [False] * (8 - blocks)
        for layer in range(8):
            converter = rig.manager.get_page_index_converter(LayerId(layer), KEY)
            pages = list(converter(base, PageIndexMode.PER_LAYER, desc))
            assert BAD_PAGE_INDEX not in pages
            assert len(set(pages)) == 8
            with pytest.raises(AssertionError):
                converter(base, None, desc)
        request.write(toks(0, 256))
        cache.commit(toks(0, 256))
        request.check()


@pytest.mark.parametrize(("rewind", "first", "second"), [(0, (0, 6), (8, 9)), (32, (0, 5), (0, 0))])
def test_ranges_follow_the_chunks(rewind: int, first: tuple[int, int], second: tuple[int, int]) -> None:
    """Windows 64 and 256: 256 tokens from 0, then 96 more; a suspend between gives the scratch back, a resume takes it again."""
    layers = [attention(layer, 4 * KIB, window=64 if layer % 2 == 0 else 256) for layer in range(4)]
    with Rig(model(layers, scratch_rewind=rewind)) as rig:
        tokens = toks(0, 352)
        request = rig.start()
        cache = request.cache
        assert cache.resize(256)
        assert (span(request, 0), span(request, 1)) == (first, (0, 0))
        request.suspend()
        assert not scratch_held(cache)
        assert request.resume()
        assert span(request, 0) == first
        assert scratch_held(cache)
        request.write(tokens[:256])
        cache.commit(tokens[:256])
        assert span(request, 0) == (0, 0)
        assert cache.resize(352, 256)
        assert (span(request, 0), span(request, 1)) == (second, (0, 0))
        request.write(tokens[256:])
        cache.commit(tokens[256:])
        request.check()


def test_only_window_minus_one_tokens_are_kept() -> None:
    """Window 64, 127 tokens: pages [no, no, yes, yes]; the next prompt reuses 127."""
    with windows(8, 64) as rig:
        rig.seed(toks(0, 127))
        assert [bool(covered) for covered in inside.coverage(rig.manager, toks(0, 127), 0)] == [False, False, True, True]
        prompt = [*toks(0, 127), *toks(5000, 5073)]
        assert rig.probe(prompt) == 127
        again = rig.start(prompt)
        assert len(again.tokens) == 127
        again.check()
        again.prefill(prompt, 73)
        again.check()


# --- what scratch means for the sizing


def test_a_constraint_counts_scratch() -> None:
    """4 requests of 512 tokens in one step, window 128 of 16 layers: 12 scratch blocks of each share one slot; the batch runs at
    exactly the bytes, which are fewer than without."""
    layers = [attention(layer, 4 * KIB, window=128) for layer in range(16)]
    config = exact(model(layers, constraints=[batch(4, 512)], max_util=1.0, scratch_rewind=0))
    plain = model(layers, constraints=[batch(4, 512)], max_util=1.0)
    assert min_slots(build_layout(config), config) == [4 * (4 + 1)]
    assert min_slots(build_layout(plain), plain) == [4 * 16]
    with Rig(config) as rig:
        run_batch(rig, 4, 512, 0)


def test_modes_and_addresses() -> None:
    """With scratch configured the index mode has to be given; per layer the base address is the pool's own for all layers of it."""
    with windows(4, 64) as rig:
        manager = rig.manager
        assert manager.supports_index_mode(PageIndexMode.PER_LAYER) is True
        assert manager.supports_index_mode(PageIndexMode.SHARED) is None
        with pytest.raises(ValueError, match="mode"):
            manager.get_mem_pool_base_address(LayerId(0), KEY)
        per_layer = {manager.get_mem_pool_base_address(LayerId(layer), KEY, PageIndexMode.PER_LAYER) for layer in range(4)}
        shared = {manager.get_mem_pool_base_address(LayerId(layer), KEY, PageIndexMode.SHARED) for layer in range(4)}
        assert (len(per_layer), len(shared)) == (1, 4)
        assert manager.all_buffer_ids[0] == BufferId(LayerId(0), KEY)


# --- cases


@pytest.mark.parametrize("smaller", [0, 16, 32, 60])
def test_giving_back_capacity_that_is_scratch(smaller: int) -> None:
    """4 tokens a block, window 8, 64 tokens from 0, then fewer: it works, or is refused cleanly with nothing changed; after suspend
    and resume the prefill starts afresh, with no slot lost."""
    layers = [attention(layer, 4 * KIB, window=8) for layer in range(8)]
    with Rig(model(layers, tokens_per_block=4, gpu=2 * MIB, scratch_rewind=0)) as rig:
        free = rig.counts().free
        request = rig.start()
        cache = request.cache
        assert cache.resize(64, 0)
        assert scratch_held(cache)
        taken = free - rig.counts().free
        before = (cache.capacity, span(request), rig.indices(cache))
        try:
            assert cache.resize(smaller, 0)
        except AssertionError:
            assert (cache.capacity, span(request), rig.indices(cache)) == before
        rig.manager.check_invariants()
        request.suspend()
        assert not scratch_held(cache)
        assert request.resume()
        if cache.capacity != 64:
            assert cache.resize(64, 0)
        assert scratch_held(cache)
        assert rig.counts().free == free - taken
        request.write(toks(0, 64))
        cache.commit(toks(0, 64))
        request.check()
        request.close()
        assert rig.counts().unavailable == 0


@pytest.mark.parametrize("drafts", [1, 4, 9])
def test_drafts_are_never_scratch(drafts: int) -> None:
    """If max_rewind_len covers the drafts, rejected tokens lie in pages. Accepts a part and rewinds, again and again."""
    layers = [attention(layer, 4 * KIB, window=8) for layer in range(4)]
    with Rig(model(layers, tokens_per_block=4, gpu=2 * MIB, scratch_rewind=drafts + 1)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 50))
        for turn in range(12):
            history = len(request.tokens)
            assert request.cache.resize(history + 1 + drafts, history)
            draft = toks(1000 * (turn + 1), 1000 * (turn + 1) + 1 + drafts)
            assert rig.engine is not None
            rig.engine.step(request.cache, draft, request.tokens)
            accepted = 1 + turn % (drafts + 1)
            request.tokens += draft[:accepted]
            request.cache.commit(draft[:accepted])
            request.check()


def test_a_resume_whose_scratch_the_device_refuses_leaves_the_request_suspended() -> None:
    """The slots that it would take are still in use by another stream, and the device refuses the wait for it: the request
    stays suspended as it was, and can be resumed later."""
    with windows(1, 32, gpu=2 * MIB, size=64 * KIB) as rig:
        cache = rig.create()
        assert cache.resume(rig.stream)
        assert cache.resize(320)
        assert scratch_held(cache)
        cache.suspend()
        free = rig.counts().free
        other = rig.create()
        stream = rig.new_stream()
        assert other.resume(stream)
        other.enable_swa_scratch_reuse = False
        assert other.resize(32 * free)
        gate = rig.driver.gate(stream)
        other.close()
        rig.driver.fail("wait_event")
        with pytest.raises(CuError):
            cache.resume(rig.stream)
        rig.manager.check_invariants()
        assert not cache.is_active
        assert not scratch_held(cache)
        assert rig.counts().free == free
        gate.open()
        assert cache.resume(rig.stream)
        assert scratch_held(cache)


def test_a_fork_that_would_read_what_lies_in_scratch_is_refused() -> None:
    """In the middle of a long step a fork would read blocks that were written only to scratch. Near the end of the step it would
    not."""
    config = model([attention(0, KIB, window=9)], tokens_per_block=4, gpu=2 * MIB, scratch_rewind=2)
    with Rig(config) as rig:
        request = rig.start()
        cache = request.cache
        assert cache.resize(31, 0)
        request.write(toks(0, 31))
        for committed in (15, 20, 27):
            cache.commit(toks(cache.num_committed_tokens, committed))
            opened = rig.manager.num_open_caches
            for suspended in (False, True):
                if suspended:
                    request.suspend()
                with pytest.raises(LogicError, match=rf"a fork at history {committed} .* advance the history to 29 or beyond"):
                    cache.fork()
                if suspended:
                    assert request.resume()
            assert rig.manager.num_open_caches == opened
        cache.history_length = 29
        twin = Request(rig, rig.own(cache.fork()), toks(0, 29), rig.new_stream())
        assert twin.resume()
        assert twin.cache.resize(32, 29)
        twin.write(toks(129, 132))
        twin.check()
        request.check()


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("step", [31, 32])
def test_a_step_that_would_read_what_lies_in_scratch_is_refused(step: int, suspends: bool) -> None:
    """More than max_rewind_len tokens of a step were rejected. Nothing changes, also by a suspension in between; near the end of
    the step the request goes on as if nothing had been."""
    config = model([attention(0, KIB, window=9), attention(1, KIB)], tokens_per_block=4, gpu=2 * MIB, scratch_rewind=2)
    with Rig(config, "random", 1) as rig:
        request = rig.start()
        cache = request.cache
        assert cache.resize(step, 0)
        request.write(toks(0, step))
        for history in (15, step - 5):
            cache.history_length = history
            if suspends:
                request.suspend()
                assert request.resume()
            for capacity in (step - 1, step + 1, step + 5):
                before = (cache.capacity, cache.history_length, span(request), rig.indices(cache))
                with pytest.raises(LogicError, match=rf"history has reached {step - 2}|a step at history {history} would read it"):
                    cache.resize(capacity)
                assert before == (cache.capacity, cache.history_length, span(request), rig.indices(cache))
        with pytest.raises(LogicError, match="a step at history"):
            cache.enable_swa_scratch_reuse = False
        cache.history_length = step - 2
        request.tokens = toks(0, step - 2)
        assert request.advance(toks(100, 106), commit=False)
        request.check()
