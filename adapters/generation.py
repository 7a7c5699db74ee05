"""A loaded version of an adapter: immutable, named by the digest of its content, borrowed through handles.

A name is only a pointer to a `Generation`; requests keep the generation that they started with. Knows nothing of files,
slots or names' life cycles. Made by `manager`, held by `store`, used by the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType

from adapters.extras import AdapterExtras
from adapters.report import AdapterReport
from adapters.spec import AdapterSpec
from adapters.weights import LoraPair


@dataclass(frozen=True, eq=False)
class Generation:
    """One adapter version in CPU memory.

    Attributes:
        digest: `sha256:…` of the tensors and their effective scales; equal content has an equal digest.
        spec: the parsed config.
        pairs: LoRA by the model's `named_modules()` name.
        report: what the load found out.
        extras: what it holds beside pairs.
        created: when it was read, in seconds since the epoch.
    """

    digest: str
    spec: AdapterSpec
    pairs: Mapping[str, LoraPair]
    report: AdapterReport
    extras: AdapterExtras = field(default_factory=AdapterExtras)
    created: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", MappingProxyType(dict(self.pairs)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, and of the files of its own tokenizer."""
        return self.report.num_bytes + sum(map(len, self.extras.tokenizer_files.values()))

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return self.report.rank

    @property
    def touches_tower(self) -> bool:
        """Whether it changes media features, so that they cannot be shared with the base model's."""
        return any(part in ("tower", "connector") for part in self.report.parts)


class GenerationHandle:
    """A borrowed generation: it stays in CPU memory until every handle on it is released.

    Attributes:
        name: the adapter's name when it was borrowed.
        generation: what the name pointed to then.
        load_ms: milliseconds that its borrower waited for it to be read; 0 where it was in memory.
    """

    def __init__(
        self,
        name: str,
        generation: Generation,
        *,
        load_ms: float = 0.0,
        retain: Callable[[str], None] = lambda digest: None,
        release: Callable[[str], None] = lambda digest: None,
        note_prompt: Callable[[str, int, int], None] = lambda name, num_tokens, num_cached: None,
    ) -> None:
        """`retain` and `release` count references by digest; the caller has already counted this handle's own.

        `note_prompt(name, num_tokens, num_cached)` hears of each prompt that begins.
        """
        self.name = name
        self.generation = generation
        self.load_ms = load_ms
        self._retain = retain
        self._release = release
        self._note_prompt = note_prompt
        self._lock = threading.Lock()
        self._is_released = False

    def fork(self, *, load_ms: float | None = None) -> GenerationHandle:
        """Another handle on the same generation, released on its own; `load_ms` where its borrower waited otherwise."""
        with self._lock:
            assert not self._is_released, "fork of a released handle"
            self._retain(self.generation.digest)
        waited = self.load_ms if load_ms is None else load_ms
        return GenerationHandle(
            self.name, self.generation, load_ms=waited, retain=self._retain, release=self._release,
            note_prompt=self._note_prompt,
        )  # fmt: skip

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Say that a prompt began on it: how long it is, and how many of its tokens the prefix cache gave."""
        self._note_prompt(self.name, num_tokens, num_cached)

    def release(self) -> None:
        """Give it back; safe to call again, and from any thread."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        self._release(self.generation.digest)

    def __enter__(self) -> GenerationHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
