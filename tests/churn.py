"""Thousands of engine steps with adapters loaded, replaced and unloaded at random, and what is left in memory afterwards.

Shared by the long-run tests on the CPU and on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from adapters.generation import Generation, GenerationHandle
from engine import Engine, SamplingParams
from engine.answer import Answer
from engine.request import TokenPrompt
from tests.oracles import make_adapter, make_model, random_ids

LLAMA = "LlamaForCausalLM"
NAMES = [f"adapter-{number}" for number in range(5)]


def make_small_world(root: Path, **overrides: int) -> tuple[Path, list[Path]]:
    """A model of one narrow layer, whose steps take little time, and four adapters of different ranks and modules."""
    shape = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256, **overrides,
    }  # fmt: skip
    model = make_model(LLAMA, root / "model", **shape)
    targets = [["q_proj", "v_proj"], ["o_proj"], ["gate_proj", "down_proj"], ["q_proj", "k_proj", "up_proj"]]
    folders = [
        make_adapter(model, LLAMA, root / f"version-{number}", targets=names, rank=number + 1, seed=number)
        for number, names in enumerate(targets)
    ]
    return model, folders


class Churn:
    """Requests on adapters that come and go, a few at a time; random, and the same for the same seed.

    Args:
        engine: one that nobody else uses.
        folders: contents that a name can point to.
        in_flight: requests under way at a time.
    """

    def __init__(self, engine: Engine, folders: Sequence[Path], *, in_flight: int = 6, seed: int = 0) -> None:
        self._engine = engine
        self._folders = folders
        self._in_flight = in_flight
        self._random = random.Random(seed)
        self._answers: list[Answer] = []
        self.num_swaps = 0
        self.num_ended = 0

    def run_until(self, num_steps: int) -> None:
        """Go on until the engine has done so many steps since its start; then end all answers and unload everything.

        Last comes a request on the base model: the engine's thread may hold on to the latest request until the next one.
        """
        while self._engine.stats().num_steps < num_steps:
            if self._random.random() < 0.5:
                self._swap()
            self._start()
            if len(self._answers) >= self._in_flight:
                self._end(self._answers.pop(self._random.randrange(len(self._answers))))
        while self._answers:
            self._end(self._answers.pop())
        for name in self._engine.adapters.names():
            self._engine.adapters.unload(name)
        for _ in range(2):
            sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            self._end(self._engine.start_sync(TokenPrompt([1, 2, 3]), sampling, lora="none")[0])

    def _swap(self) -> None:
        """Load a name, replace its content under requests that use it, or unload it."""
        adapters, name = self._engine.adapters, self._random.choice(NAMES)
        if adapters.contains(name) and self._random.random() < 0.3:
            adapters.unload(name)
        else:
            adapters.load(name, str(self._random.choice(self._folders)), load_inplace=True)
        self.num_swaps += 1

    def _start(self) -> None:
        lora = self._random.choice([*self._engine.adapters.names(), "none"])
        prompt = random_ids(self._random.randint(1, 20), self._random.randrange(50))
        sampling = SamplingParams(temperature=0, max_tokens=self._random.randint(1, 100), ignore_eos=True)
        self._answers += self._engine.start_sync(TokenPrompt(prompt), sampling, lora=lora)

    def _end(self, answer: Answer) -> None:
        """Read an answer to its end, or leave it."""
        if self._random.random() < 0.1:
            answer.abort()
        for _ in answer:
            pass
        self.num_ended += 1


def footprint(engine: Engine) -> dict[str, int]:
    """What is alive after all answers have ended. `tensors` and `rss_kb` may wobble a little, all else must not."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    kinds = [type(thing) for thing in gc.get_objects()]
    stats, adapters = engine.stats(), engine.adapters.stats()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return {
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "handles": sum(issubclass(kind, GenerationHandle) for kind in kinds),
        "generations": sum(issubclass(kind, Generation) for kind in kinds),
        "answers": sum(issubclass(kind, Answer) for kind in kinds),
        "kv_blocks": stats.kv_blocks_used,
        "requests": stats.num_running + stats.num_waiting,
        "lora_rows": stats.lora_rows_used,
        "cpu_adapters": adapters.num_cpu,
        "adapters": adapters.num_adapters,
        "rss_kb": pages * 4,
    }


def least_growth_kb(marks: Sequence[dict[str, int]]) -> int:
    """The smallest growth of the process from one footprint to the next, in KiB.

    The allocator takes and returns pages as it likes, now and then megabytes at once; what leaks grows every time.
    """
    return min(after["rss_kb"] - before["rss_kb"] for before, after in itertools.pairwise(marks))
