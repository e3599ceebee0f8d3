"""The driver's side of a worker: a process that runs only while it is asked something."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.protocol import Answer, ProtocolError, Request, decode, encode, read_answer


class Worker:
    """A long-lived process with one engine.

    Between questions the whole process group is stopped (SIGSTOP): thread pools that spin while they wait would
    otherwise take a core from whoever is being measured.

    Args:
        command: starts the worker.
        settings: of its engine.
        environment: the process's environment variables.
        log: where its standard error goes.
    """

    def __init__(
        self, command: Sequence[str], settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
            )
        self._unread = b""
        self._running = True
        self.facts: dict[str, Any] = {}
        self._write(settings)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the model is loaded, then stop the worker.

        Raises:
            ProtocolError: it failed, ended, or took longer than ``timeout`` seconds.
        """
        message = self._read(timeout)
        if "ready" not in message:
            raise ProtocolError(str(message.get("error", "said something else than that it is ready")))
        self.facts = dict(message["ready"])
        self._pause()

    def ask(self, request: Request, timeout: float) -> Answer:
        """One answer.

        Raises:
            ProtocolError: as in ``wait_ready``.
        """
        self._resume()
        self._write(asdict(request))
        answer = read_answer(self._read(timeout))
        self._pause()
        return answer

    def close(self) -> None:
        """End the process and whatever it started; it has nothing to save."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(encode(message).encode())
            stdin.flush()
        except BrokenPipeError:
            raise ProtocolError(self._ended()) from None

    def _read(self, timeout: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(timeout):
                    raise ProtocolError(f"no answer within {timeout:.0f} s; see {self.log}")
                chunk = os.read(stdout.fileno(), 1 << 16)
                if not chunk:
                    raise ProtocolError(self._ended())
                self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return decode(line.decode())

    def _ended(self) -> str:
        return f"the worker ended with status {self._process.wait()}; see {self.log}"

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self._running = False

    def _resume(self) -> None:
        if not self._running:
            self._signal(signal.SIGCONT)
            self._running = True

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
