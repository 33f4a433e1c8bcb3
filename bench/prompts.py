"""What an engine does for one request's prompt: look it up, take it up, grow, commit, close, suspend and resume."""

from __future__ import annotations

from typing import ClassVar

from bench.setting import BLOCK, Bench, Setting, given_as, prompt_tokens
from bench.work import Work
from kv_cache_manager_v2 import KVCache


class _OnCachedPrompt(Work):
    """A prompt that is cached as a whole, and `setting.cached` blocks of others."""

    repeats: ClassVar[int] = 10

    def __init__(self, setting: Setting) -> None:
        self.bench = Bench(setting, setting.cached + 2 * setting.blocks + 64)
        self.bench.cache_others(setting.cached)
        prompt = prompt_tokens(setting.prompt)
        self.bench.cache_prompt(prompt)
        self.prompt = given_as(setting.tokens_as, prompt)

    def close(self) -> None:
        self.bench.close()


class Probe(_OnCachedPrompt):
    """The match alone."""

    unit = "prompt"

    def run(self) -> int:
        manager = self.bench.manager
        for _i in range(self.repeats):
            found = manager.probe_reuse(None, self.prompt)
        assert found == self.bench.setting.prompt
        return self.repeats


class Admit(_OnCachedPrompt):
    """Create, resume and close."""

    unit = "request"

    def run(self) -> int:
        manager, stream = self.bench.manager, self.bench.stream
        for _i in range(self.repeats):
            cache = manager.create_kv_cache(None, self.prompt)
            assert cache.resume(stream)
            cache.close()
        return self.repeats


class SuspendResume(_OnCachedPrompt):
    """Suspend and resume a request whose pages stay on the GPU."""

    unit = "request"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.cache = self.bench.manager.create_kv_cache(None, self.prompt)
        assert self.cache.resume(self.bench.stream)

    def run(self) -> int:
        cache = self.cache
        for _i in range(self.repeats):
            cache.suspend()
            assert cache.resume()
        return self.repeats

    def close(self) -> None:
        self.cache.close()
        super().close()


class _ColdPrompt(Work):
    """A request whose prompt is not cached; every run uses another prompt."""

    unit = "prompt"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, setting.cached + 4 * setting.blocks + 64)
        self.bench.cache_others(setting.cached)
        self.serial = 0
        self.prompt = prompt_tokens(setting.prompt)
        self.cache: KVCache | None = None

    def opened(self) -> KVCache:
        cache = self.cache
        assert cache is not None
        return cache

    def before(self) -> None:
        self.serial += 1
        self.prompt = prompt_tokens(self.setting.prompt, self.serial)
        self.cache = self.bench.manager.create_kv_cache()
        assert self.cache.resume(self.bench.stream)

    def after(self) -> None:
        self.opened().close()

    def close(self) -> None:
        self.bench.close()


class ResizeCold(_ColdPrompt):
    """Allocate the pages of a whole prompt in one call. Slots are free, or become free by dropping the oldest prompts' pages."""

    def run(self) -> int:
        assert self.opened().resize(self.setting.prompt)
        return 1


class ComputeCold(_ColdPrompt):
    """Allocate the pages of a whole prompt and commit it."""

    def run(self) -> int:
        assert self.opened().resize(self.setting.prompt)
        self.opened().commit(self.prompt)
        return 1


class CommitCold(_ColdPrompt):
    """Commit the whole prompt in one call, or turn by turn where each turn leaves a snapshot."""

    def before(self) -> None:
        super().before()
        if not self.setting.recurrent:
            assert self.opened().resize(self.setting.prompt)

    def run(self) -> int:
        if self.setting.recurrent:
            self.opened().close()
            self.cache = self.bench.serve(self.prompt)
        else:
            self.opened().commit(self.prompt)
        return 1


class CloseCommitted(_ColdPrompt):
    """Close a request whose prompt is committed: its pages stay cached."""

    unit = "request"

    def before(self) -> None:
        super().before()
        self.opened().close()
        self.cache = self.bench.serve(self.prompt)

    def run(self) -> int:
        self.opened().close()
        return 1


class CommitWithEvents(CommitCold):
    """Commit a prompt with an event manager, which queues records. Block keys and events are not made."""

    def after(self) -> None:
        super().after()
        drain_events(self.bench)


class CommitFlushDrain(CommitCold):
    """Commit a prompt, flush its events and read them."""

    def before(self) -> None:
        super().before()
        drain_events(self.bench)  # what the preparation left

    def run(self) -> int:
        units = super().run()
        drain_events(self.bench)
        return units


def drain_events(bench: Bench) -> None:
    events = bench.events
    if events is not None:
        events.flush_iteration_events()  # type: ignore[attr-defined]  # of the event manager, which old versions lack
        events.get_latest_events(0)  # type: ignore[attr-defined]


class ResumeFromHost(Work):
    """Resume a request whose pages are in host memory, on a GPU full of another request's pages, which are offloaded."""

    unit = "request"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.bench = Bench(setting, setting.blocks, 4 * setting.blocks)
        manager = self.bench.manager
        total = manager.get_storage_statistics()[0].total
        self.away = manager.create_kv_cache()
        assert self.away.resume(self.bench.stream)
        assert self.away.resize(setting.prompt)
        self.away.suspend()
        self.other = manager.create_kv_cache()
        assert self.other.resume(self.bench.stream)
        assert self.other.resize(total * BLOCK)
        self.other.suspend()

    def before(self) -> None:
        assert self.other.resume()
        self.other.suspend()
        self.moved = self.bench.manager.movement.pages_moved(1, 0)

    def run(self) -> int:
        assert self.away.resume()
        return 1

    def after(self) -> None:
        assert self.bench.manager.movement.pages_moved(1, 0) == self.moved + self.setting.blocks
        self.away.suspend()

    def close(self) -> None:
        self.away.close()
        self.other.close()
        self.bench.close()
