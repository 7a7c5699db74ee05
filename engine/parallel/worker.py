"""A worker process: a rank beside rank 0, with its share of the model, which does what it is told and nothing else.

Started by `engine/parallel/team` alone, with the number of an open socket to it as the argument. It ends when it is told to,
when its standard input ends, which is when rank 0's process does, and at the first fault, whose reason it reports.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from adapters.slots import RowCopy
from engine.attention import bind_attention
from engine.flight import FlightTokens
from engine.kv_cache import KVCache
from engine.lora_side import make_buffers, make_metadata
from engine.parallel.group import join_group, leave_group, open_device
from engine.parallel.loading import ShardedLoad
from engine.parallel.messages import (
    ClearBlocks,
    ClearRow,
    Failed,
    Layout,
    Loaded,
    Ready,
    Setup,
    SharedSlab,
    Started,
    Step,
    Stop,
    WriteRow,
    receive,
    send,
)
from engine.parallel.runner import FollowingRunner
from engine.parallel.shards import LocalPairs, unpack
from engine.setup import kv_bytes, load_base, lora_dtype, make_graphs
from engine.warmup import warm_up

logger = logging.getLogger(__name__)


class Worker:
    """One rank's model and rows.

    Args:
        setup: what to load.
        connection: to rank 0.
    """

    def __init__(self, setup: Setup, connection: Connection) -> None:
        config = self._config = setup.config
        self._connection = connection
        self._base = load_base(config, ShardedLoad(setup.rank, setup.size, functools.partial(self._join, setup)))
        send(connection, Loaded(kv_bytes(config, self._base)))
        layout = receive(connection)
        assert isinstance(layout, Layout), "rank 0 settles the layout first"
        self._build(layout)
        send(connection, Ready())

    def _join(self, setup: Setup, device: torch.device) -> None:
        """Meet the others. What takes long or may fail by itself comes before: they wait without noticing an end."""
        open_device(setup.rank, device)
        send(self._connection, Started())
        join_group(setup.rank, setup.size, setup.store, device)

    def run(self) -> None:
        """Follow until told to stop. Raises EOFError where rank 0 has gone."""
        while True:
            message = receive(self._connection)
            if isinstance(message, Step):
                for segment in message.lora_segments:
                    copy = self._copies.pop(segment.lora_slot, None)
                    if copy is not None:
                        copy.wait()
                self._runner.follow(message)
            elif isinstance(message, WriteRow):
                self._write(message)
            elif isinstance(message, ClearRow):
                assert self._buffers is not None, "rows without adapters"
                self._copies.pop(message.lora_slot, None)
                self._buffers.clear(message.lora_slot)
            elif isinstance(message, ClearBlocks):
                self._cache.clear(message.blocks)
            else:
                assert isinstance(message, Stop), f"not for workers: {message}"
                return

    def _build(self, layout: Layout) -> None:
        """What steps read: the same as rank 0 has, in this rank's sizes."""
        config, base = self._config, self._base
        split = base.split
        assert split is not None, "a worker has a share"
        self._cache = KVCache(base.kv_shape, layout.num_blocks, config.block_size, base.device)
        attention_step = bind_attention(base.decoder, self._cache)
        metadata = make_metadata(config, base) if config.enable_lora else {}
        self._buffers = None
        if config.enable_lora:
            surface = base.surface(
                max_lora_rank=config.max_lora_rank, lora_dtype=lora_dtype(config.lora_dtype, base),
                target_suffixes=tuple(config.lora_target_modules),
            )  # fmt: skip
            self._buffers = make_buffers(config, base, surface, metadata)
        self._copies: dict[int, RowCopy] = {}
        flight_tokens = FlightTokens(layout.max_num_seqs, base.device)
        graphs = make_graphs(
            config, base, attention_step, metadata, flight_tokens, max_num_seqs=layout.max_num_seqs,
            max_model_len=layout.max_model_len,
        )  # fmt: skip
        self._runner = FollowingRunner(
            base, attention_step, metadata, None, None, config.block_size, flight_tokens, graphs, group=split.group
        )
        if graphs is not None:
            warm_up(base, self._runner, graphs, config, metadata)

    def _write(self, message: WriteRow) -> None:
        assert self._buffers is not None, "rows without adapters"
        local = LocalPairs({})
        if message.num_elements:
            slab = SharedSlab.receive(self._connection, message.num_elements, message.dtype)
            local = unpack(message.packed, slab.tensor)
        copy = self._buffers.write(message.lora_slot, local)
        self._copies.pop(message.lora_slot, None)
        if copy is not None:
            self._copies[message.lora_slot] = copy


def main() -> None:
    """Run until the end; never returns."""
    # Ctrl-C goes to all processes of a terminal, a supervisor's SIGTERM to all of a service; rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    setup = receive(connection)
    assert isinstance(setup, Setup), "the first message says what to load"
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s rank={setup.rank} %(name)s %(message)s")
    try:
        Worker(setup, connection).run()
        leave_group(is_whole=True)
    except EOFError:
        pass  # Rank 0 has gone.
    except Exception as error:
        logger.exception("event=worker_failed rank=%d", setup.rank)
        first_line = next(iter(str(error).splitlines()), "")[:200]
        send(connection, Failed(f"{type(error).__name__}: {first_line}"))
        _end(1)
    _end(0)


def end_with_parent() -> None:
    """Block until standard input ends, and end the process then: nobody is left to tell it what to do."""
    sys.stdin.buffer.read()
    os._exit(1)


def _end(status: int) -> None:
    """Without waiting for libraries that wait for other ranks."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
