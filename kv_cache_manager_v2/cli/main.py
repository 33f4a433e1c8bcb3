"""The `kvcm` command: picks a tool, runs it, and turns errors into one line and an exit status.

Exit status 0 is success, 1 a failed check, 2 an error, 130 an interrupt. The user sees no traceback, except with KVCM_DEBUG=1 that
of an unexpected error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Final, NoReturn

from kv_cache_manager_v2.build import COMPILED, VERSION
from kv_cache_manager_v2.cli import plan, replay
from kv_cache_manager_v2.cli.contents import TokenRangeError
from kv_cache_manager_v2.cli.curves import PlanSizeError
from kv_cache_manager_v2.cli.streams import OutputError, drop_output, fill_closed_streams, flush_output, tell
from kv_cache_manager_v2.cli.traces import TraceError
from kv_cache_manager_v2.errors import KVCacheError

EXIT_OK: Final = 0
EXIT_CHECK_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130  # the exit status that a shell reports for SIGINT


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command, with a subcommand per tool."""
    parser = OneLineParser(prog="kvcm", description="Tools of kv_cache_manager_v2, the KV-cache manager of LLM inference engines.")
    parser.add_argument("--version", action="version", version=f"kvcm {VERSION} ({'compiled' if COMPILED else 'interpreted'})")
    tools = parser.add_subparsers(title="tools", dest="tool", metavar="TOOL", required=True)
    replay.add_parser(tools)
    plan.add_parser(tools)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool and return the exit status. `arguments` are those after the program's name, by default from `sys.argv`."""
    fill_closed_streams()
    status = _run(arguments)
    try:
        flush_output()  # help or a version
    except BrokenPipeError:
        pass
    except OSError as error:
        return _fail(f"standard output: {error.strerror}")
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = make_parser().parse_args(arguments)
        passed = options.run(options)
    except SystemExit as exit_request:  # argparse has printed the help or an error
        return exit_request.code if isinstance(exit_request.code, int) else EXIT_USAGE
    except (TraceError, TokenRangeError, PlanSizeError, OutputError, KVCacheError) as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of standard output has closed it, as `head` does
        drop_output()
        return EXIT_OK
    except MemoryError as error:
        return _fail(f"out of memory: {error}" if str(error) else "out of memory")
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except OverflowError as error:
        return _fail(f"a number is too large: {error}")
    except KeyboardInterrupt:
        tell("kvcm: interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("KVCM_DEBUG") == "1":
            raise
        return _fail(f"unexpected {type(error).__name__}: {error} (this is a fault of kvcm; KVCM_DEBUG=1 shows where)")
    return EXIT_OK if passed else EXIT_CHECK_FAILED


def _fail(message: str) -> int:
    tell(f"kvcm: error: {' '.join(message.split())}")
    return EXIT_USAGE
