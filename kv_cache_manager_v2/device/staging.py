"""The staging ring: pinned host memory through which bytes pass between device and disk.

Rule: a piece is used again in stream order. The stream of its next user waits for the point at which its last user is over. The
host never waits, and a piece whose end of use is not known yet is passed over. The caller splits a request that is larger than the
ring: `largest` is the most that one piece can have.

File transfers can outlive their time limit. A piece that such a transfer may still touch is quarantined until it has really
ended. A piece that took over memory of a *read* that timed out later is `suspect`: late bytes may have been written into it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from kv_cache_manager_v2.device.arenas import HostArena
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.device.os_memory import round_up
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream

DEFAULT_RING_BYTES: Final = 64 << 20
PIECE_ALIGNMENT: Final = 256  # bytes; pieces begin at multiples of it, which copies like

# The life of a piece: lent -> released -> settled, or -> quarantined -> settled.
_LENT: Final = 0  # being filled and emptied; its end of use is not known
_RELEASED: Final = 1  # over at `point`; whether its transfers ended in time is not known yet
_QUARANTINED: Final = 2  # a transfer has timed out and may still touch it
_SETTLED: Final = 3  # over at `point`, all transfers have ended


class StagingPiece:
    """A part of the ring, lent to one user."""

    def __init__(self, offset: int, nbytes: int, address: int, from_file: bool) -> None:
        self.offset = offset  # in the ring, bytes
        self.nbytes = nbytes
        self.address = address
        self.from_file = from_file  # file reads fill it, so that a late one may still write into it
        self.point: Point = NULL_POINT  # once released: when its use is over
        self.state = _LENT
        self.transfers = 0  # file transfers that use it and have not ended
        self.timed_out = False  # it is or was quarantined
        self.after: list[StagingPiece] = []  # pieces filled by file reads whose memory it took over before they were settled

    @property
    def lent(self) -> bool:
        """Whether its end of use is not known."""
        return self.state == _LENT

    def suspect(self) -> bool:
        """Whether a read that timed out may have written into this piece while it was in use: its bytes must not be trusted.

        Meaningful once the pieces lent earlier have been settled or quarantined.
        """
        return any(piece.from_file and piece.timed_out for piece in self.after)


class StagingRing:
    """A ring of pinned host memory. `acquire` is O(log pieces + pieces overlapped); the memory is taken at the first one."""

    def __init__(self, driver: Driver, timeline: Timeline, nbytes: int = DEFAULT_RING_BYTES) -> None:
        if nbytes < PIECE_ALIGNMENT or nbytes % PIECE_ALIGNMENT:
            raise ConfigError(f"a staging ring of {nbytes} bytes: must be a positive multiple of {PIECE_ALIGNMENT}")
        self.largest = nbytes  # bytes; most that one piece can have, when nothing is lent or quarantined
        self._timeline = timeline
        self._arena = HostArena(driver, nbytes)
        self.cursor = 0  # offset from which on the next piece is looked for; a user that wants memory which the processor's caches
        # still hold sets it back to a piece that it has released
        self._begins: list[int] = []  # the parts of the ring that were used last by a piece: ascending, disjoint
        self._ends: list[int] = []
        self._users: list[StagingPiece] = []
        self._lent: list[StagingPiece] = []
        self._quarantined: list[StagingPiece] = []

    @property
    def lent(self) -> int:
        """Pieces whose end of use is not known."""
        return len(self._lent)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def acquire(self, stream: Stream, minimum: int, maximum: int, from_file: bool) -> StagingPiece | None:
        """A piece of `minimum` to `maximum` bytes, for work that is queued on the stream from now on.

        None if what is neither lent nor quarantined has no such piece in one run: release one first, or wait for transfers.
        `from_file`: file reads will fill it.
        """
        if not 0 < minimum <= maximum:
            raise LogicError(f"a piece of {minimum} to {maximum} bytes makes no sense")
        if minimum > self.largest:
            raise LogicError(f"a piece of {minimum} bytes is larger than the staging ring of {self.largest}: split the request")
        place = self._find(self.cursor, minimum)
        if place is None:
            place = self._find(0, minimum)
            if place is None:
                return None
        begin, end = place
        nbytes = min(maximum, end - begin)
        if self._arena.num_slots == 0:
            self._arena.resize(1)
        piece = StagingPiece(begin, nbytes, self._arena.base + begin, from_file)
        self._take_over(stream, piece)
        self.cursor = round_up(begin + nbytes, PIECE_ALIGNMENT) % self.largest
        self._lent.append(piece)
        return piece

    def release(self, piece: StagingPiece, point: Point) -> None:
        """The piece's use is over at this point: its bytes may be handed on in stream order. Its transfers are settled later."""
        if piece.state != _LENT:
            raise LogicError(f"the piece at offset {piece.offset} is not lent: it was released already")
        self._lent.remove(piece)
        piece.state = _RELEASED
        piece.point = point

    def settle(self, piece: StagingPiece) -> None:
        """All of the piece's transfers have ended. A quarantined piece may be used again."""
        if piece.state == _LENT:
            raise LogicError(f"the piece at offset {piece.offset} is settled before it is released")
        if piece.state == _QUARANTINED:
            self._quarantined.remove(piece)
        piece.state = _SETTLED
        piece.after = []

    def quarantine(self, piece: StagingPiece) -> None:
        """A transfer of this piece has timed out and may still touch it: it is not used again before `settle`."""
        if piece.state == _LENT:
            self.release(piece, NULL_POINT)
        if piece.state == _RELEASED:
            piece.state = _QUARANTINED
            piece.timed_out = True
            self._quarantined.append(piece)

    def finish(self, piece: StagingPiece, point: Point) -> None:
        """The piece's use is over at this point, and all of its transfers have ended: `release` and `settle` in one."""
        self.release(piece, point)
        self.settle(piece)

    def close(self) -> None:
        """Free the memory; LogicError while a piece is lent or quarantined. Released ones must be over."""
        if self._lent or self._quarantined:
            raise LogicError(
                f"the staging ring is closed with {len(self._lent)} pieces lent and {len(self._quarantined)} quarantined"
            )
        for piece in self._users:
            self._timeline.synchronize(piece.point)
        self._begins, self._ends, self._users = [], [], []
        self._arena.close()

    # --- inside

    def _find(self, begin: int, minimum: int) -> tuple[int, int] | None:
        """The first free run of at least `minimum` bytes from an offset on, up to the next piece that may not be used."""
        blocked = [(piece.offset, piece.offset + piece.nbytes) for piece in self._lent]
        blocked += [(piece.offset, piece.offset + piece.nbytes) for piece in self._quarantined]
        blocked.sort()
        blocked.append((self.largest, self.largest))
        for blocked_begin, blocked_end in blocked:
            if begin + minimum <= blocked_begin:
                return begin, blocked_begin
            begin = max(begin, round_up(blocked_end, PIECE_ALIGNMENT))
        return None

    def _take_over(self, stream: Stream, piece: StagingPiece) -> None:
        """Make the stream wait for the last users of the piece's bytes, and the piece their user."""
        begin, end = piece.offset, piece.offset + piece.nbytes
        first = bisect_right(self._ends, begin)  # the first part that reaches beyond `begin`
        last = first
        while last < len(self._begins) and self._begins[last] < end:
            last += 1
        for i in range(first, last):
            user = self._users[i]
            self._timeline.wait(stream, user.point)
            for earlier in [user, *user.after]:
                if earlier.from_file and earlier.state != _SETTLED and earlier not in piece.after:  # writes spoil nothing
                    piece.after.append(earlier)
        begins, ends, users = [begin], [end], [piece]
        if first < last and self._begins[first] < begin:  # what remains before the piece, and after it
            begins.insert(0, self._begins[first])
            ends.insert(0, begin)
            users.insert(0, self._users[first])
        if first < last and self._ends[last - 1] > end:
            begins.append(end)
            ends.append(self._ends[last - 1])
            users.append(self._users[last - 1])
        self._begins[first:last] = begins
        self._ends[first:last] = ends
        self._users[first:last] = users

    def check_invariants(self) -> None:
        assert 0 <= self.cursor < self.largest
        assert self.cursor % PIECE_ALIGNMENT == 0
        assert len(self._begins) == len(self._ends) == len(self._users)
        before = 0
        for begin, end, user in zip(self._begins, self._ends, self._users, strict=True):
            assert before <= begin < end <= self.largest
            assert user.offset <= begin
            assert end <= user.offset + user.nbytes
            before = end
        spans = sorted((piece.offset, piece.offset + piece.nbytes) for piece in self._lent)
        for i in range(1, len(spans)):
            assert spans[i - 1][1] <= spans[i][0], "two lent pieces overlap"
        assert all(piece.state == _LENT for piece in self._lent)
        assert all(piece.state == _QUARANTINED for piece in self._quarantined)
