"""Rank 0's side of tensor parallelism: starts the workers, tells them each step, notices when one is lost, ends them.

A worker that ends by itself, or a step that fails anywhere, leaves the ranks at different places, from which they cannot
find together again: then all workers are ended, the engine stops, and every request hears why. Owned by `engine/engine`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.config import EngineConfig
from engine.errors import AppError, WorkerLost
from engine.kv_cache import KVCache
from engine.parallel.group import abort_group, check_no_group, join_group, leave_group
from engine.parallel.loading import ShardedLoad
from engine.parallel.messages import (
    Failed,
    Layout,
    Loaded,
    Message,
    Ready,
    Setup,
    SharedSlab,
    Started,
    Stop,
    WriteRow,
    receive,
    send,
)

if TYPE_CHECKING:
    from engine.loop import BlockCleaner
    from engine.model import BaseModel
    from engine.runner import Runner

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent.parent
# Not `-m`: that imports from the working directory first, which may hold anything.
_PROGRAM = (
    f"import sys; sys.path[:] = [{str(_ROOT)!r}, *filter(None, sys.path)]; "
    "from engine.parallel.worker import main; main()"
)
_END_SECONDS = 10.0
"""How long a worker may take to end before it is killed."""
_NOTICE_SECONDS = 10.0
"""How long to wait for the news of a worker's end once a step has failed, for the reason that it gives."""

A = TypeVar("A", Started, Loaded, Ready)


@dataclass(eq=False)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    answers: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)
    sending: threading.Lock = field(default_factory=threading.Lock)


class Team:
    """The workers of one engine.

    Attributes:
        size: ranks, this process included.
        load: how this rank loads its share; starts the workers once it is known that the model can be split.
        on_loss: hears once, on a thread of its own, why the engine cannot go on.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel_size
        self.on_loss: Callable[[WorkerLost], None] = lambda error: None
        self._config = config
        self._workers: list[_Worker] = []
        self._loss: WorkerLost | None = None
        self._has_loss = threading.Event()
        self._is_closing = False
        self._has_joined = False
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.load = ShardedLoad(0, self.size, self.connect)

    def connect(self, device: torch.device) -> None:
        """Start the workers and meet them in the process group.

        Raises:
            InvalidRequest: this process is in a group already.
            WorkerLost: a worker has ended.
        """
        check_no_group()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(1, self.size):
            worker = _start(rank, self.size, device)
            self._workers.append(worker)
            threading.Thread(target=self._listen, args=(worker,), name=f"worker-{rank}", daemon=True).start()
            self._send(worker, Setup(self._config, rank, self.size, store))
            logger.info("event=worker_started rank=%d pid=%d", rank, worker.process.pid)
        for worker in self._workers:
            self._answer(worker, Started)
        join_group(0, self.size, store, device)
        self._has_joined = True
        self.check()  # A loss that came before the flag has left the group alone.

    def least_kv_bytes(self, own: int) -> int:
        """The bytes for the KV cache of the rank that has the least left."""
        return min([own, *(self._answer(worker, Loaded).kv_bytes for worker in self._workers)])

    def lay_out(self, cache: KVCache, max_model_len: int, max_num_seqs: int) -> None:
        """Tell the workers what all ranks have alike; they build, compile and record beside this process."""
        self.send(Layout(cache.num_blocks, max_model_len, max_num_seqs))

    def wait_ready(self) -> None:
        """Wait until every worker takes steps."""
        for worker in self._workers:
            self._answer(worker, Ready)
        logger.info("event=ranks_ready ranks=%d", self.size)

    def make_runner(self, base: BaseModel) -> Callable[..., Runner]:
        """`LeadingRunner`, to be called with the arguments of `Runner`."""
        from engine.parallel.runner import LeadingRunner

        assert base.split is not None, "a team has a share of a model"
        return functools.partial(LeadingRunner, group=base.split.group, team=self)

    def make_cleaner(self, cache: KVCache) -> BlockCleaner:
        """Zeroes KV blocks on all ranks."""
        from engine.parallel.rows import BlockMirror

        return BlockMirror(self, cache)

    def send(self, message: Message) -> None:
        """Tell all workers. Raises `WorkerLost`."""
        self.check()
        for worker in self._workers:
            with worker.sending:
                self._send(worker, message)

    def send_row(self, message_of: Callable[[int], tuple[WriteRow, SharedSlab | None]]) -> None:
        """Send each worker its part of an adapter, made by `message_of(rank)`. Raises `WorkerLost`."""
        self.check()
        for worker in self._workers:
            message, slab = message_of(worker.rank)
            try:
                with worker.sending, self._reaching(worker):
                    send(worker.connection, message)
                    if slab is not None:
                        slab.send(worker.connection, worker.process.pid)
            finally:
                if slab is not None:
                    slab.close()

    @property
    def is_whole(self) -> bool:
        """Whether all workers are there."""
        return self._loss is None

    def check(self) -> None:
        """Raise `WorkerLost` where a worker has gone."""
        if self._loss is not None:
            raise WorkerLost(self._loss.message)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What must happen on all ranks or not at all: a fault inside ends the team.

        Raises:
            WorkerLost: instead of the fault, unless the team is being closed.
        """
        self.check()
        try:
            yield
        except Exception as error:
            self._has_loss.wait(_NOTICE_SECONDS if _is_of_the_group(error) else 0.0)
            self._lose(f"rank 0 failed in a step ({type(error).__name__}: {_first_line(error)})")
            self.check()
            raise  # The team is being closed, which is no loss.

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """End the workers where the start fails, and give a lost worker as the reason where that was it."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, AppError) and self._workers:
                self._has_loss.wait(_NOTICE_SECONDS if _is_of_the_group(error) else 0.0)
            loss = self._loss
            self._end(is_whole=False)  # The workers may be anywhere: nothing of theirs is waited for.
            if loss is not None and isinstance(error, Exception):
                raise WorkerLost(loss.message) from error
            raise

    def close(self) -> None:
        """End all workers and leave the group; nothing of them is left on return. May be called again."""
        self._end(is_whole=self._loss is None)

    def give_up(self) -> None:
        """End the team because the ranks wait for one that does not answer; steps under way fail."""
        self._lose("one of them does not answer")

    def _end(self, *, is_whole: bool) -> None:
        """End all workers: by themselves and in order where the team is whole, else at once."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self._loss is not None:
            self._has_loss.wait(_NOTICE_SECONDS)  # Another thread is ending them.
        try:
            if is_whole:
                self._dismiss()
        finally:
            self._end_workers(_END_SECONDS if is_whole else 0.0)
            if self._has_joined:
                leave_group(is_whole=False)
            if self._folder is not None:
                self._folder.cleanup()

    def _dismiss(self) -> None:
        """Tell the workers to end, and leave the group with them."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                send(worker.connection, Stop())
        leave_group(is_whole=True)
        self._has_joined = False

    def _answer(self, worker: _Worker, kind: type[A]) -> A:
        answer = worker.answers.get()
        if not isinstance(answer, kind):
            self._has_loss.wait()
            self.check()
        assert isinstance(answer, kind), "a worker answered out of turn"
        return answer

    def _send(self, worker: _Worker, message: Message) -> None:
        with self._reaching(worker):
            send(worker.connection, message)

    @contextlib.contextmanager
    def _reaching(self, worker: _Worker) -> Iterator[None]:
        """A message that may not have arrived whole ends the team: nothing after it could be understood."""
        try:
            yield
        except OSError:
            self._has_loss.wait(_NOTICE_SECONDS)
            self._lose(f"worker {worker.rank} does not listen any more")
            self.check()
            raise

    def _listen(self, worker: _Worker) -> None:
        """A thread: hand on a worker's answers, and notice its end."""
        reason = ""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(worker.connection)
                if isinstance(message, Failed):
                    reason = message.reason
                else:
                    worker.answers.put(message)
        try:
            status = worker.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        if not self._is_closing:
            ended = "closed its connection" if status is None else _ending(status)
            self._lose(f"worker {worker.rank} {ended}" + (f" ({reason})" if reason else ""))
        worker.answers.put(None)

    def _lose(self, reason: str) -> None:
        """The first call ends the team."""
        with self._lock:
            if self._loss is not None or self._is_closing:
                return
            self._loss = WorkerLost(
                f"The model is spread over {self.size} processes, and {reason}; the engine has stopped. Restart the server."
            )
        logger.error("event=worker_lost reason=%r", reason)
        try:
            self.on_loss(self._loss)
            self._end_workers(0.0)
            if self._has_joined:
                abort_group()
        finally:
            self._has_loss.set()

    def _end_workers(self, patience_s: float) -> None:
        for worker in self._workers:
            process = worker.process
            if patience_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _start(rank: int, size: int, device: torch.device) -> _Worker:
    """A new process, which ends when its standard input does: with this process, whatever ends that."""
    ours, theirs = Pipe()
    environment = dict(os.environ, LOCAL_RANK=str(rank))
    if device.type == "cpu":
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // size)))
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env=environment,
    )
    theirs.close()
    return _Worker(rank, process, ours)


def _ending(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _is_of_the_group(error: BaseException) -> bool:
    """Whether a collective may have failed because another rank has gone; torch has no type for all of these."""
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, torch.OutOfMemoryError)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
