"""The operations of a simulation with commits ahead: tokens are committed before their step is queued, and may be taken back.

Rule: an engine queues a step right after it has committed the step's tokens ahead, so what others match is computed in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_cache_manager_v2.errors import LogicError
from tests.simulation import conduct
from tests.simulation.model import Request, Token
from tests.simulation.scene import Live
from tests.simulation.setups import Setup
from tests.simulation.world import World


def can_commit_ahead(setup: Setup, model: Request) -> bool:
    """Whether the tokens of the next step may be committed ahead, after all that is computed before it."""
    if model.width > 1 or not model.committing or setup.scratch:
        return False
    beg = conduct.first_written(model)
    return beg < model.capacity and model.clean_run(0) >= beg - model.committed


class AheadWorld(World):
    """A `World` whose requests may commit ahead."""

    def commit_ahead(self, live: Live, fresh: Sequence[Token]) -> str:
        """Commit the first tokens of a step ahead, then queue the step."""
        model = live.model
        beg = conduct.first_written(model)
        all_of_them = model.recurrent  # a state that stands beyond them could never be committed
        count = max(beg, model.capacity - (0 if all_of_them else len(fresh) // 2)) - model.committed
        tokens = [*model.beams[0].tokens[model.committed : beg], *fresh][:count]
        failure, _result = self.attempt(live, "commit ahead", lambda: live.cache.commit_ahead(tokens))
        if failure:
            return failure
        self.compute(live, [fresh])
        self.promise(live, len(tokens))
        self.rows(live)
        return self.count("commit ahead", "done", *self.positions(live))

    def promise(self, live: Live, count: int) -> None:
        """Commit in the model what the engine has computed, and leave the history where it is."""
        history = live.model.history
        self.library.commit(live.model.commit(0, count))
        live.model.history = history

    def _refused(self, live: Live, name: str, call: Callable[[], object]) -> str | None:
        """The outcome of a call that needs computed tokens; None if all are computed."""
        if live.lost or live.model.committed <= live.model.history:
            return None
        return self.mistake(live, name, call, LogicError)

    def _out_of_order(self, live: Live, stream: int) -> bool:
        """Whether the request has matched blocks that another stream is about to compute."""
        return not live.lost and any(used.stream != self.streams[stream] for used in live.cache.state.counts_on)

    def resume(self, live: Live, stream: int, check: bool) -> str:
        if self._out_of_order(live, stream):
            return self.mistake(live, "resume out of order", lambda: live.cache.resume(self.streams[stream]), LogicError)
        return super().resume(live, stream, check)

    def change_stream(self, live: Live, stream: int) -> str:
        def call() -> None:
            live.cache.cuda_stream = self.streams[stream]

        ahead = live.active and live.model.committed > live.model.history and live.cache.cuda_stream != self.streams[stream]
        if (ahead and not live.lost) or self._out_of_order(live, stream):
            return self.mistake(live, "stream out of order", call, LogicError)
        return super().change_stream(live, stream)

    def suspend(self, live: Live) -> str:
        self._may_take_back(live)
        taken, committed = self._taken_back(live), live.model.committed
        if taken:
            live.model.committed = live.model.history
        outcome = super().suspend(live)
        if live.active:
            live.model.committed = committed
        return outcome

    def attempt(self, live: Live | None, operation: str, call: Callable[[], object]) -> tuple[str, object]:
        if live is not None and operation == "resize" and self.setup.config.commit_min_snapshot and self._taken_back(live):
            operation = "resize ahead"  # copies pages, as a commit does, if a snapshot is due
        return super().attempt(live, operation, call)

    def resize(self, live: Live, capacity: int, history: int, check: bool) -> str:
        self._may_take_back(live)
        return super().resize(live, capacity, history, check)

    def close(self, live: Live) -> str:
        self._may_take_back(live)
        return super().close(live)

    def drop_handle(self, live: Live) -> str:
        self._may_take_back(live)
        return super().drop_handle(live)

    def stop(self, live: Live) -> str:
        return self._refused(live, "stop ahead", live.cache.stop_committing) or super().stop(live)

    def plan(self, live: Live) -> str:
        return self._refused(live, "plan ahead", live.cache.plan_committed_block_drop) or super().plan(live)

    def fork(self, live: Live, check: bool) -> str:
        return self._refused(live, "fork ahead", live.cache.fork) or super().fork(live, check)

    def set_width(self, live: Live, width: int, check: bool) -> str:
        return self._refused(live, "width ahead", lambda: setattr(live.cache, "beam_width", width)) or super().set_width(
            live, width, check
        )

    def _taken_back(self, live: Live) -> bool:
        return live.model.committed > live.model.history

    def _may_take_back(self, live: Live) -> None:
        """From now on requests may be lost that have matched what this one committed ahead."""
        if self._taken_back(live):
            self.count("commit ahead", "taken back")
            self.taken_back = True
