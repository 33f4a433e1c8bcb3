"""What an unexpected exception leaves: a whole manager, or one that says that it is poisoned and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    AlreadyDroppedError,
    CacheStatus,
    ConfigError,
    CorruptedError,
    CuError,
    DeviceUnavailableError,
    HostRegistrationError,
    KVCache,
    KVCacheError,
    KVCacheManager,
    LogicError,
    OutOfMemoryError,
    OutOfPagesError,
    PageDataLostError,
    UnknownBufferError,
    commit_batch,
    num_live_managers,
    poison_reason,
    resize_batch,
    take_poison,
)
from kv_cache_manager_v2.request import call as call_module
from kv_cache_manager_v2.request.call import Call
from tests.manager.test_any_exception import Scene, scene_of
from tests.support.drivers import Strange
from tests.support.interrupts import interpreted
from tests.support.models import GRAIN
from tests.support.rig import GPU, toks


def break_pins(scene: Scene) -> None:
    """A fault: a block is counted as used by a request that does not exist."""
    block = scene.manager.shared.tree.all_blocks()[0]
    block.pins += 1


def refuse(scene: Scene, fault: Callable[[Scene], None] | None, error: BaseException) -> None:
    """Have the next device call raise, with a fault in the structures if one is given."""

    def raised() -> BaseException:
        if fault is not None:
            fault(scene)
        return error

    scene.device.orders = [(scene.device.calls, scene.device.calls + 1, raised)]


def poison(scene: Scene) -> None:
    refuse(scene, break_pins, Strange("of a kind that is unknown"))
    with pytest.raises(Strange):
        scene.active.suspend()
    scene.device.heal()


class Refused(OutOfPagesError):
    """A subclass that the package does not know."""


REFUSALS: list[type[KVCacheError]] = [
    ConfigError,
    UnknownBufferError,
    LogicError,
    AlreadyDroppedError,
    OutOfPagesError,
    PageDataLostError,
    Refused,
]
UNEXPECTED: list[type[KVCacheError]] = [
    KVCacheError,
    OutOfMemoryError,
    DeviceUnavailableError,
    CuError,
    HostRegistrationError,
    CorruptedError,
]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return scene_of("window", tmp_path, "")


def test_every_call_names_the_first_cause(scene: Scene) -> None:
    """All calls but queries and shutdown, even a step inside a block, which takes no lock. Queries answer as far as they can."""
    active = scene.active
    manager = scene.manager
    length = active.capacity
    poison(scene)
    reason = manager.poison_reason()
    assert reason is not None
    assert "suspend() was left by Strange: of a kind that is unknown" in reason
    calls: list[Callable[[], object]] = [
        lambda: active.resize(length + 1),
        lambda: active.commit([5006]),
        lambda: resize_batch([active], [length + 1]),
        lambda: commit_batch([active], [5006]),
        active.suspend,
        active.stop_committing,
        active.fork,
        lambda: scene.suspended.resume(scene.stream),
        lambda: scene.suspended.prefetch(GPU),
        manager.create_kv_cache,
        manager.adjust,
        manager.check_invariants,
        lambda: manager.resize(GPU, GRAIN),
    ]
    for call in calls:
        with pytest.raises(CorruptedError, match="Strange"):
            call()
    assert manager.probe_reuse(None, toks(0, 8)) == 8
    assert manager.num_open_caches == 3
    assert manager.get_storage_statistics()
    assert manager.poison_reason() == reason
    manager.shutdown()
    assert not scene.leaks()
    assert (active.status, active.num_blocks) == (CacheStatus.CLOSED, 0)
    active.close()


def test_a_second_fault_keeps_the_first_cause(scene: Scene) -> None:
    """Later faults follow from the first one, and say less."""
    poison(scene)
    reason = scene.manager.poison_reason()
    scene.manager.shared.corrupt("something later")
    assert scene.manager.poison_reason() == reason


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError(), Strange(), ValueError()])
def test_an_exception_that_broke_nothing_poisons_nothing(scene: Scene, error: BaseException) -> None:
    """The caller gets it, and the manager continues to work."""
    refuse(scene, None, error)
    with pytest.raises(type(error)):
        scene.active.suspend()
    scene.device.heal()
    assert scene.manager.poison_reason() is None
    assert scene.active.is_active
    scene.active.suspend()
    scene.finish()


def test_typed_errors_are_not_audited(scene: Scene) -> None:
    """A typed error has changed nothing by construction, so it costs no audit."""
    break_pins(scene)
    with pytest.raises(LogicError):
        scene.active.resume(scene.stream)
    assert scene.manager.poison_reason() is None
    scene.manager.shared.tree.all_blocks()[0].pins -= 1
    scene.finish()


@pytest.mark.parametrize("kind", REFUSALS + UNEXPECTED)
def test_a_subclass_of_a_refusal_is_a_refusal(scene: Scene, kind: type[KVCacheError]) -> None:
    """Only the other errors are audited, on both builds."""
    break_pins(scene)
    shared = scene.manager.shared
    with pytest.raises(kind), shared.lock, Call(shared, "call()"):
        raise kind("given")
    assert (scene.manager.poison_reason() is None) == (kind in REFUSALS)
    shared.tree.all_blocks()[0].pins -= 1
    if kind in REFUSALS:
        scene.finish()
    else:
        scene.manager.shutdown()
        assert not scene.leaks()


def test_clearing_ends_the_poison(scene: Scene) -> None:
    """Only once no cache is open and the cleared manager is consistent; then it serves as before."""
    manager = scene.manager
    suspended, scene.opened = scene.opened, []
    for cache in suspended:
        cache.close()
    assert manager.take_poison() is None
    refuse(scene, break_pins, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        manager.resize(GPU, 2 * GRAIN)
    scene.device.heal()
    with pytest.raises(LogicError, match="clear_reusable_blocks"):
        manager.take_poison()
    manager.clear_reusable_blocks()
    with pytest.raises(CorruptedError):
        manager.create_kv_cache()
    reason = manager.take_poison()
    assert reason is not None
    assert "KeyboardInterrupt" in reason
    assert manager.poison_reason() is None
    scene.start(toks(0, 10), 8)
    scene.finish()


def test_the_process_can_be_asked_for_all_managers(scene: Scene) -> None:
    """One that is poisoned among others: its reason, its end, and the count of those that live."""
    before = num_live_managers()
    other = KVCacheManager(scene.manager.init_config, driver=scene.device)
    assert num_live_managers() == before + 1
    assert poison_reason() is None
    assert take_poison() is None
    poison(scene)
    assert poison_reason() == scene.manager.poison_reason()
    assert other.poison_reason() is None
    with pytest.raises(LogicError):
        take_poison()
    scene.manager.shutdown()
    assert poison_reason() is None
    other.shutdown()
    assert num_live_managers() == before - 1


def test_clearing_needs_closed_caches(scene: Scene) -> None:
    """Their pages are unknown even once their handles are closed. The manager can only be shut down."""
    poison(scene)
    manager = scene.manager
    with pytest.raises(LogicError, match="open"):
        manager.clear_reusable_blocks()
    for cache in scene.opened:
        cache.close()
    with pytest.raises(CorruptedError, match="stays so"):
        manager.clear_reusable_blocks()
    with pytest.raises(LogicError):
        manager.take_poison()
    manager.shutdown()


@pytest.mark.parametrize("shut_down_first", [False, True])
def test_closing_a_cache_of_a_poisoned_manager_ends_the_handle_alone(scene: Scene, shut_down_first: bool) -> None:
    """An engine closes what it has open and shuts down, in either order. No page and no device is touched by the close."""
    poison(scene)
    manager = scene.manager
    if shut_down_first:
        manager.shutdown()
    calls = scene.device.calls
    for cache in scene.opened * 2:
        cache.close()
        assert cache.status == CacheStatus.CLOSED
    assert scene.device.calls == calls
    assert shut_down_first or manager.num_open_caches == 0
    with pytest.raises(LogicError):
        scene.active.resize(20)
    manager.shutdown()
    assert not scene.leaks()


def test_a_close_that_poisons_the_manager_raises_what_left_it(scene: Scene) -> None:
    """The next close is one on a poisoned manager."""
    refuse(scene, break_pins, Strange("while closing"))
    with pytest.raises(Strange):
        scene.active.close()
    scene.device.heal()
    assert scene.manager.poison_reason() is not None
    scene.active.close()
    assert scene.active.status == CacheStatus.CLOSED
    scene.manager.shutdown()
    assert not scene.leaks()


def test_an_interrupt_of_the_audit_leaves_it_to_the_next_call(scene: Scene) -> None:
    """A second Ctrl-C interrupts the audit after the first: the next call begins with an audit."""
    manager = scene.manager
    manager.shared.running = "suspend()"  # as it is left then
    break_pins(scene)
    with pytest.raises(CorruptedError, match=r"suspend\(\) was left by an exception"):
        scene.active.resize(20)
    manager.shutdown()


@interpreted
@pytest.mark.parametrize("lack", [MemoryError, RecursionError])
def test_without_memory_or_stack_for_the_audit_the_next_call_audits(
    lack: type[BaseException], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the audit has run, every call is refused."""
    scene.manager.shared.running = "suspend()"

    def no_memory(shared: object) -> None:
        raise lack

    with monkeypatch.context() as patch:
        patch.setattr(call_module, "check_everything", no_memory)
        with pytest.raises(OutOfMemoryError, match="not enough memory or stack for the audit"):
            scene.manager.create_kv_cache()
    scene.manager.create_kv_cache().close()
    scene.finish()


def test_a_call_that_was_cut_short_without_damage_is_no_poison(scene: Scene) -> None:
    """The next call audits, finds nothing, and goes on."""
    scene.manager.shared.running = "suspend()"
    assert scene.active.resize(12)
    scene.manager.shared.running = "suspend()"
    assert scene.manager.probe_reuse(None, toks(0, 8)) == 8
    assert scene.manager.poison_reason() is None
    scene.finish()


def test_a_question_in_another_thread_is_answered(scene: Scene) -> None:
    """The lock is free after an interrupt, poisoned or not."""
    poison(scene)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(scene.manager.probe_reuse(None, toks(0, 8))))
    thread.start()
    thread.join(20)
    assert got == [8]
    scene.manager.shutdown()


# --- shutdown and `with`


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Strange()])
def test_with_shows_the_exception_of_its_block(scene: Scene, error: BaseException) -> None:
    """Whatever fails while the manager ends is logged; all memory is freed."""

    def block() -> None:
        with scene.manager:
            poison(scene)
            raise error

    with pytest.raises(type(error)):
        block()
    assert not scene.leaks()


def test_with_shuts_down_although_a_close_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The request ends with the manager."""

    def block() -> None:
        with scene.manager:
            refuse(scene, None, ValueError("no close"))
            raise Strange

    with pytest.raises(Strange):
        block()
    assert not scene.leaks()
    assert "no close" in caplog.text


def test_with_over_a_cache_shows_the_exception_of_its_block(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """An error of close() is logged. Where the manager is poisoned, there is none."""

    def block(cache: KVCache) -> None:
        with cache:
            raise Strange

    shared = scene.manager.shared
    shared.refuse_changes("shutdown() was refused by the device")
    with pytest.raises(Strange):
        block(scene.active)
    assert "could not be closed" in caplog.text
    caplog.clear()
    shared.corrupt("something")
    with pytest.raises(Strange):
        block(scene.active)
    assert scene.active.status == CacheStatus.CLOSED
    assert not caplog.text
    scene.manager.shutdown()


def test_a_shutdown_that_the_device_refuses_can_be_tried_again(scene: Scene) -> None:
    """Nothing else can be called then but questions; the one that succeeds has freed everything."""
    for cache in scene.opened:
        cache.close()
    manager = scene.manager
    scene.device.orders = [(scene.device.calls + 1, scene.device.calls + 2, Strange)]  # its second device call
    with pytest.raises(Strange):
        manager.shutdown()
    scene.device.heal()
    with pytest.raises(LogicError, match="shutdown"):
        manager.create_kv_cache()
    assert manager.get_storage_statistics()
    manager.shutdown()
    assert not scene.leaks()
    manager.shutdown()
    with pytest.raises(LogicError, match="has been shut down"):
        manager.create_kv_cache()


def answer_during_the_wait(scene: Scene, before: Callable[[], object]) -> list[int]:
    """The answers that another thread gets while `shutdown` waits for the device."""
    answers: list[int] = []
    synchronize = scene.device.inner.synchronize

    def slow() -> None:
        delattr(scene.device, "synchronize")  # once
        asking = threading.Thread(target=lambda: answers.append(scene.manager.probe_reuse(None, toks(0, 8))))
        asking.start()
        asking.join(20)
        before()
        synchronize()

    setattr(scene.device, "synchronize", slow)  # noqa: B010 (a method of its class)
    return answers


def test_others_are_served_while_shutdown_waits_for_the_device(scene: Scene) -> None:
    """The wait is over before the lock is taken."""
    for cache in scene.opened:
        cache.close()
    answers = answer_during_the_wait(scene, lambda: None)
    scene.manager.shutdown()
    assert answers[0] == 8


def test_a_shutdown_inside_a_call_is_refused(scene: Scene) -> None:
    """From a driver, a listener or a callback it raises, and the outer call continues."""
    refusals: list[str] = []

    def call_back() -> BaseException:
        try:
            scene.manager.shutdown()
        except LogicError as error:
            refusals.append(str(error))
        return Strange()

    scene.device.orders = [(scene.device.calls, scene.device.calls + 1, call_back)]
    with pytest.raises(Strange):
        scene.active.suspend()
    scene.device.heal()
    assert len(refusals) == 1
    scene.finish()


def test_a_construction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Whatever raises, at any device call, or in the engine's clock."""

    def broken_clock() -> float:
        raise Strange

    scene = scene_of("window", tmp_path, "")
    config = scene.manager.init_config
    scene.finish()
    before = scene.device.inner.leaks()
    with pytest.raises(Strange):
        KVCacheManager(config, driver=scene.device, clock=broken_clock)
    assert scene.device.inner.leaks() == before
