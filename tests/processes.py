"""Python programs of tests, each in a fork of a process that has imported everything and has run nothing.

A fresh interpreter takes ten seconds to import the toolkit or vLLM, a fork tens of milliseconds. The process that is
forked, the server, is itself a fork of the process of the tests, made when they have been collected, so it has
imported what their files import. No test has run in it, it has one thread, and no operation of torch has started more.

Tests of imports, of the time to start, of installed scripts and of the memory of a job start an interpreter instead.
So do all programs on a machine with a GPU, whose driver does not work in forks.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

FORK = get_context("fork")
TIMEOUT_S = 600.0
# pytest's; loggers that are configured while tests are collected write to them
CAPTURED = (sys.stdout, sys.stderr)


class Order(NamedTuple):
    """A program to start, and the directory for what it prints."""

    arguments: list[str]
    environment: dict[str, str]
    directory: Path
    files: Path


class Program:
    """A program that was started, with a part of what :class:`subprocess.Popen` has."""

    def __init__(self, server: Server, number: int, pid: int, files: Path) -> None:
        self.pid = pid
        self._server, self._number, self._files = server, number, files

    @property
    def stdout(self) -> str:
        """All that it has written so far."""
        return (self._files / "1").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._files / "2").read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative after a signal; ``None`` while it runs."""
        return self._server.status(self._number, 0.0)

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Return the exit status; a program that takes longer is killed."""
        status = self._server.status(self._number, timeout)
        if status is None:
            self.kill()
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, self.stdout, self.stderr)
        return status

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that is forked."""

    def __init__(self) -> None:
        self._orders, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, self._orders), daemon=False)
        self._process.start()
        theirs.close()
        self._files = tempfile.TemporaryDirectory(prefix="programs")
        self._numbers = itertools.count()
        self._statuses: dict[int, int] = {}

    def start(self, arguments: list[str], environment: dict[str, str], directory: Path, text: str) -> Program:
        number = next(self._numbers)
        files = Path(self._files.name) / str(number)
        files.mkdir()
        for name, content in enumerate((text, "", "")):
            (files / str(name)).write_text(content)
        self._orders.send((number, Order(arguments, environment, directory, files)))
        while isinstance(found := self._receive(None), tuple):
            pass
        assert isinstance(found, int)
        return Program(self, number, found, files)

    def status(self, number: int, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        while number not in self._statuses and self._receive(max(deadline - time.monotonic(), 0.0)) is not None:
            pass
        return self._statuses.get(number)

    def _receive(self, timeout: float | None) -> int | tuple[int, int] | None:
        """The pid of a program that was started, or the number and status of one that ended."""
        if not self._orders.poll(timeout):
            return None
        found = self._orders.recv()
        if isinstance(found, tuple):
            self._statuses[found[0]] = found[1]
        return found

    def stop(self) -> None:
        self._orders.close()
        self._process.join()
        self._files.cleanup()


_SERVERS: list[Server] = []


def start_server() -> None:
    """Fork the server if there is none; when tests are collected, or for the first program of one run by hand."""
    if not _SERVERS:
        _SERVERS.append(Server())


def stop_server() -> None:
    while _SERVERS:
        _SERVERS.pop().stop()


def start(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = ""
) -> Program:
    """Start what ``python`` would run with these arguments: ``-c PROGRAM``, ``-m MODULE`` or a file, and its own.

    Args:
        arguments: of the interpreter.
        env: variables of the program; by default those of the test.
        cwd: its working directory; by default that of the test.
        text: its standard input.
    """
    start_server()
    environment = dict(os.environ if env is None else env)
    return _SERVERS[0].start([*map(str, arguments)], environment, cwd or Path.cwd(), text)


def run(*arguments: object, timeout: float = TIMEOUT_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; options are those of :func:`start`."""
    program = start(*arguments, **options)
    status = program.wait(timeout)
    return subprocess.CompletedProcess([*map(str, arguments)], status, program.stdout, program.stderr)


def start_ranks(
    number: int, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> list[Program]:
    """Start a program once for each rank, with the variables that ``torchrun`` sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(os.environ if env is None else env) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number))
    return [start(*arguments, env=shared | rank, cwd=cwd) for rank in ranks]


def finish(programs: Sequence[Program], timeout: float = TIMEOUT_S) -> None:
    """Wait for programs that wait for each other; if one fails, the others are killed."""
    deadline = time.monotonic() + timeout
    try:
        while None in (statuses := [program.returncode for program in programs]) and not any(statuses):
            assert time.monotonic() < deadline, f"still running after {timeout} s"
            time.sleep(0.01)
        failed = [f"{each.stdout[-4000:]}\n{each.stderr[-4000:]}" for each in programs if each.returncode]
        assert not failed, "\n".join(failed)
    finally:
        for program in programs:
            program.kill()


# --- in the server


def _serve(orders: Connection, theirs: Connection) -> None:
    theirs.close()
    _close_other_files(orders)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the tests ends it
    running: dict[int, tuple[int, BaseProcess]] = {}
    while True:
        for ready in wait([orders, *running]):
            if isinstance(ready, Connection):
                try:
                    number, order = orders.recv()
                except EOFError:
                    for _, process in running.values():
                        process.kill()
                    return
                process = FORK.Process(target=_program, args=(orders, order))
                process.start()
                running[process.sentinel] = number, process
                orders.send(process.pid)
            elif isinstance(ready, int):
                number, process = running.pop(ready)
                process.join()
                orders.send((number, process.exitcode))


def _close_other_files(orders: Connection) -> None:
    """Close files of the process of the tests, whose readers would wait until the server has ended, too."""
    kept = {0, 1, 2, orders.fileno(), *(stream.fileno() for stream in CAPTURED)}
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        try:
            os.close(descriptor)
        except OSError:  # that of the directory itself
            continue


# --- in a program


def _program(orders: Connection, order: Order) -> None:
    import torch

    orders.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(3):
        file = os.open(order.files / str(number), os.O_RDWR | os.O_APPEND)
        for target in (number, *([CAPTURED[number - 1].fileno()] if number else [])):
            os.dup2(file, target, inheritable=target <= 2)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    if torch.cuda.is_available():
        os.execv(sys.executable, [sys.executable, *order.arguments])
    # torch has read the variable when it was imported; the tests themselves have one thread, too
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _interpret(order.arguments)


def _interpret(arguments: list[str]) -> None:
    """Do what ``python`` does with its arguments."""
    # runpy needs finders as the library has them, which pytest's are not
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest.")]
    kind, *rest = arguments
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = ["", *paths]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif kind == "-m":
        sys.argv = rest
        sys.path[:0] = [os.getcwd(), *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[:0] = [str(Path(kind).parent.absolute()), *paths]
        runpy.run_path(kind, run_name="__main__")
