"""The standard streams of the command, and the file to which a report is written.

An output that cannot be written is found before the work starts, as far as the system allows. A closed stream causes no traceback.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

STANDARD: Final = (0, 1, 2)


class OutputError(Exception):
    """The report cannot be written. The text names the file and the reason."""


def fill_closed_streams() -> None:
    """Open the null device in place of closed standard streams; otherwise the next file opened would get their numbers.

    `sys.stdin` and `sys.stdout` stay None, so that using them can be refused. Output to a closed standard error is lost.
    """
    for number in STANDARD:
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)


def tell(message: str) -> None:
    """Write a line to standard error. It is lost if standard error cannot be written: the exit status carries the same
    information."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Flush standard output. If that raises OSError, the output is lost; Python would otherwise report the error again at exit."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
        raise


def drop_output() -> None:
    """Redirect standard output to the null device."""
    if sys.stdout is not None and not sys.stdout.closed:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, STANDARD[1])
        os.close(null)


class ReportOutput:
    """The output of a report or a picture: a file, or standard output for None. A context manager around the work.

    Raises OutputError on entry if it cannot be written, or is the trace. A new file is removed again if nothing was written.
    """

    def __init__(self, path: str | None, trace: str, option: str = "--output") -> None:
        self._path = path
        self._trace = trace
        self._option = option  # that names the file
        self._file: BinaryIO | None = None
        self._is_new = False
        self._written = False

    def __enter__(self) -> ReportOutput:
        path = self._path
        if path is None:
            if sys.stdout is None:
                raise OutputError("standard output is closed; --output FILE writes the report to a file")
            return self
        self._is_new = not os.path.lexists(path)
        if self._is_trace(path):
            raise OutputError(f"{self._option} {path}: this is the trace; name another file")
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            if os.path.isdir(path) or not os.access(path, os.W_OK):
                raise OutputError(f"{self._option} {path}: cannot be written")
            return self  # opening a pipe or a device now could block until there is a reader
        try:
            self._file = Path(path).open("ab")
        except OSError as error:
            raise OutputError(f"{self._option} {path}: {error.strerror or error}") from error
        return self

    def _is_trace(self, path: str) -> bool:
        """Whether the path is the file that the trace is read from."""
        try:
            read = os.fstat(STANDARD[0]) if self._trace == "-" else os.stat(self._trace)
            return stat.S_ISREG(read.st_mode) and os.path.samestat(os.stat(path), read)
        except OSError:
            return False  # one of them does not exist

    def write(self, text: str) -> None:
        """Write the report. Raises OutputError, and BrokenPipeError if the reader of standard output has gone."""
        if self._path is not None:
            self.write_bytes(text.encode(errors="backslashreplace"))
            return
        try:
            _write_to_standard_output(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output: {error.strerror or error}") from error

    def write_bytes(self, data: bytes) -> None:
        """Write the file. Raises OutputError, and BrokenPipeError if it is a pipe whose reader has gone."""
        assert self._path is not None
        try:
            if self._file is None:
                Path(self._path).write_bytes(data)
            else:
                self._file.truncate(0)
                self._file.write(data)
                self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self._option} {self._path}: {error.strerror or error}") from error
        self._written = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is reported already
                self._file.close()
            if self._is_new and not self._written and self._path is not None:
                Path(self._path).unlink(missing_ok=True)


def _write_to_standard_output(text: str) -> None:
    output = sys.stdout
    try:
        output.write(text)
    except UnicodeEncodeError:  # such as a file name with characters that the terminal's encoding lacks
        output.write(text.encode("ascii", "backslashreplace").decode("ascii"))
    flush_output()
