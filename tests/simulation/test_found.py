"""What the simulation has found, each as the few operations that matter. The scene itself does the comparing."""

from __future__ import annotations

from pathlib import Path

from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from tests.simulation import conduct
from tests.simulation.model import Kind, Token
from tests.simulation.scene import Live
from tests.simulation.setups import Setup, plain
from tests.simulation.world import World

FULL = Kind()
STATE = Kind(recurrent=True)


def opened(setup: Setup, stream: int = 0) -> tuple[World, Live]:
    """A scene with one request that runs."""
    world = World(setup)
    return world, run(world, [], stream)


def run(world: World, prompt: list[Token], stream: int = 0) -> Live:
    world.create(0, prompt)
    live = world.live[-1]
    assert world.resume(live, stream, check=True) == "true"
    return live


def compute(world: World, live: Live, capacity: int, history: int, tokens: list[list[Token]] | None = None) -> None:
    """A step to these lengths; without tokens, all beams compute zeros."""
    assert world.resize(live, capacity, history, check=True) == "true"
    count = capacity - conduct.first_written(live.model)
    world.compute(live, tokens if tokens is not None else [[0] * count for _beam in range(live.model.width)])


def test_the_snapshot_where_a_block_ends_is_that_of_the_committed_beam(tmp_path: Path) -> None:
    """The committed beam's state enters the tree, and goes on when the others are dropped."""
    world, live = opened(plain(str(tmp_path), [FULL, STATE]))
    world.set_width(live, 2, check=True)
    compute(world, live, 4, 0, [[0, 0, 0, 0], [1, 1, 1, 1]])
    world.commit(live, 1, 4, is_end=False)
    world.check_bytes()
    world.set_width(live, 1, check=True)
    compute(world, live, 5, 4)
    world.finish()


def test_a_fork_of_several_beams_continues_the_committed_one(tmp_path: Path) -> None:
    world, live = opened(plain(str(tmp_path), [FULL]))
    world.set_width(live, 2, check=True)
    compute(world, live, 6, 0, [[0] * 6, [1] * 6])
    world.commit(live, 1, 6, is_end=False)
    world.fork(live, check=True)
    twin = world.live[-1]
    assert world.resume(twin, 1, check=True) == "true"
    compute(world, twin, 9, 6)
    world.commit(twin, 0, 3, is_end=False)
    world.check_bytes()
    world.finish()


def test_beams_exchanged_while_suspended_have_no_page_indices(tmp_path: Path) -> None:
    """`stop_committing` publishes the committed beam's tail, whether the request runs or not."""
    world, live = opened(plain(str(tmp_path), [FULL]))
    world.set_width(live, 2, check=True)
    compute(world, live, 6, 0, [[0] * 6, [1] * 6])
    world.commit(live, 1, 6, is_end=False)
    world.suspend(live)
    world.stop(live)
    world.check()
    world.finish()


def test_the_state_of_a_fork_without_pages_is_published_where_it_stands(tmp_path: Path) -> None:
    """With recurrent layers only there is nothing to copy at the first resume; the tail is the fork's own from then on."""
    world, live = opened(plain(str(tmp_path), [STATE]))
    compute(world, live, 7, 0)
    world.commit(live, 0, 7, is_end=False)
    world.fork(live, check=True)
    twin = world.live[-1]
    assert world.resume(twin, 0, check=True) == "true"
    compute(world, twin, 15, 7)
    world.commit(twin, 0, 8, is_end=True)
    world.check_bytes()
    world.create(0, [0] * 16)
    assert world.live[-1].model.committed == 15
    world.finish()


def test_a_copied_state_that_waits_for_its_first_resume_can_be_moved_down(tmp_path: Path) -> None:
    world, live = opened(plain(str(tmp_path), [FULL, STATE]))
    compute(world, live, 4, 0)
    world.commit(live, 0, 4, is_end=False)
    world.fork(live, check=True)
    world.check()
    world.finish()


def test_a_page_whose_block_comes_to_lie_in_scratch_is_given_up(tmp_path: Path) -> None:
    """It held only what will be computed again, so it does not wait for a commit."""
    world, live = opened(plain(str(tmp_path), [Kind(window=1), Kind(window=4)], size=3, max_rewind=1))
    compute(world, live, 7, 0)
    compute(world, live, 11, 6)
    world.check()
    world.finish()


def test_each_beam_has_scratch_of_its_own(tmp_path: Path) -> None:
    world, live = opened(plain(str(tmp_path), [Kind(window=2)], size=2, max_rewind=0))
    world.set_width(live, 2, check=True)
    assert world.resize(live, 12, 0, check=True) == "true"
    assert live.cache.has_scratch_slots
    world.compute(live, [[0] * 12, [1] * 12])
    world.check_bytes()
    world.finish()


def test_a_fork_waits_for_what_is_written_behind_a_published_tail(tmp_path: Path) -> None:
    """The tail's page belongs to the tree, and its owner goes on writing behind the committed tokens."""
    world, live = opened(plain(str(tmp_path), [FULL]), stream=0)
    compute(world, live, 2, 0)
    world.commit(live, 0, 1, is_end=False)
    world.stop(live)
    gate: EmulatedGate = world.driver.gate(world.streams[0])
    compute(world, live, 3, 2)
    assert world.resize(live, 3, 3, check=False) == "true"
    world.fork(live, check=False)
    twin = world.live[-1]
    assert world.resume(twin, 1, check=False) == "true"
    gate.open()
    world.check_bytes()
    world.finish()


def test_a_lost_page_that_waited_for_its_commit_is_not_published(tmp_path: Path) -> None:
    """It is out of its window, so the request goes on without it; others must not be given its bytes."""
    world, live = opened(plain(str(tmp_path), [Kind(window=1)], size=1, slots=4, tiers="gd", faults=True))
    compute(world, live, 2, 0)
    assert world.resize(live, 2, 2, check=False) == "true"  # both pages are held for a late commit
    world.fault("write_file", 1, 4, "error")
    other = run(world, [])
    assert world.resize(other, 4, 0, check=False) == "true"  # offloads them
    world.driver.synchronize()
    world.heal()
    world.close(other)
    world.commit(live, 0, 2, is_end=False)
    assert sum(world.manager.movement.lost) > 0
    world.check_bytes()
    world.finish()


def test_lengths_and_pages_agree_after_a_device_failure_in_a_resize(tmp_path: Path) -> None:
    """Pages have been released when the device fails: the history is the new one, and the request goes on."""
    world, live = opened(plain(str(tmp_path), [Kind(window=4)], size=1, slots=6, tiers="gh", faults=True))
    compute(world, live, 5, 0)
    compute(world, live, 6, 5)
    world.fault("copy_batch", 1, 1, "error")
    outcome = world.resize(live, 8, 6, check=False)
    assert outcome == "device failure"
    world.check()
    world.heal()
    compute(world, live, 8, 6)
    world.check_bytes()
    world.finish()
