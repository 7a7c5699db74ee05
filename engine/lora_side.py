"""The engine's side of adapters: their manager, the rows that steps read, and the way from the one into the other.

Makes what says which tokens use which adapter, the LoRA buffers and the pool of rows, and loads what the settings name. Owned
by `engine/engine`; knows nothing of requests.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.generation import GenerationHandle
from adapters.located import Located
from adapters.manager import AdapterManager
from adapters.slab_pool import SlabPool
from adapters.slots import SlotPool
from adapters.surface import ModelSurface
from engine.adapter_text import AdapterTexts
from engine.added_tokens import SlotMetadata
from engine.batch import MAX_PROMPT_ROWS
from engine.config import EngineConfig, LoRAModule
from engine.encoder_cache import EncoderCache
from engine.errors import AppError
from engine.lora_layers import LoraBuffers
from engine.model import BaseModel
from engine.page_lock import CudaPageLock
from engine.routing import RESERVED_NAMES
from engine.setup import lora_dtype
from engine.slot_writers import SlotWriters, make_extra_writers
from kernels import LoraMetadata

if TYPE_CHECKING:
    from engine.parallel.team import Team

logger = logging.getLogger(__name__)

PostToEngine = Callable[[Callable[[], None]], bool]
"""Runs something on the engine thread between two steps; False where the thread has ended."""


class LoraSide:
    """Adapters of one engine.

    Args:
        config: the settings.
        base: the model, whose linears become LoRA-aware here.
        texts: judges adapters' tokenizers.
        encoder_cache: forgets what an adapter's tower computed when no name points to it any more.
        base_names: names of the base model, which no adapter may have.
        adapter_dir: where uploads are kept.
        locate: turns an address into a local folder.
        has_graphs: whether steps are recorded, so that all that they read must be there from the start.
        team: the workers where the model is split.

    Attributes:
        adapters: the adapter manager.
        metadata: which tokens use which row, by part of the model; empty where adapters are off.
        slots: the rows; None where adapters are off.
        num_bytes: memory of the rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModel,
        texts: AdapterTexts,
        encoder_cache: EncoderCache,
        *,
        base_names: Collection[str],
        adapter_dir: Path,
        locate: Callable[[str], Located],
        has_graphs: bool,
        team: Team | None = None,
    ) -> None:
        self._config = config
        self._team = team
        self._encoder_cache = encoder_cache
        self._post: PostToEngine = lambda action: False
        self.metadata = make_metadata(config, base) if config.enable_lora else {}
        self.slots: SlotPool | None = None
        self.num_bytes = 0
        self._slab_bytes = 0
        surface = base.surface(
            max_lora_rank=config.max_lora_rank,
            lora_dtype=lora_dtype(config.lora_dtype, base),
            target_suffixes=tuple(config.lora_target_modules),
            has_scale_shift=config.enable_dora or not has_graphs,
            extra_vocab_size=config.lora_extra_vocab_size,
            why_tokenizer_unfit=texts.why_unfit,
        )
        if config.enable_lora:
            self._make_rows(base, surface, has_graphs=has_graphs)
        max_cpu_bytes = None if config.max_cpu_lora_mb is None else config.max_cpu_lora_mb * 2**20
        # Workers' parts are packed into memory of their own: the slabs that they are cut from are read by no device.
        page_lock = CudaPageLock(base.device) if self._slab_bytes else None
        self._slabs = SlabPool(page_lock, max_bytes=max_cpu_bytes)
        self.adapters = AdapterManager(
            surface,
            adapter_dir=adapter_dir,
            max_cpu_loras=config.max_cpu_loras,
            max_cpu_bytes=max_cpu_bytes,
            on_retire=self._retire,
            reserved_names={*base_names, *RESERVED_NAMES},
            max_upload_bytes=config.max_upload_mb * 2**20,
            locate=locate,
            slabs=self._slabs,
        )
        slots = self.slots
        self.adapters.residency = lambda digest: slots is not None and slots.lookup(digest) is not None

    def bind(self, post: PostToEngine) -> None:
        """Say how to reach the engine thread; before any adapter is loaded."""
        self._post = post

    def load_configured(self, check_modality: Callable[[str], None]) -> None:
        """List stored uploads again, and load what the settings name.

        Raises:
            AppError: what is wrong, with the setting at fault.
        """
        config = self._config
        if not config.enable_lora:
            return
        self.adapters.restore()
        for module in config.lora_modules:
            self._load_named(f"--lora-modules {module.name}={module.path}", module)
        for modality, name in (config.default_mm_loras or {}).items():
            check_modality(modality)
            if not self.adapters.contains(name):
                # A path or id, as in vLLM: it becomes an adapter under the modality's name.
                setting = f"--default-mm-loras {modality}={name} (no adapter has that name)"
                self._load_named(setting, LoRAModule(modality, name))
                name = modality
            self.adapters.set_default(modality, name)
        self._slabs.prepare(self._slab_bytes)

    def prefetch(self, name: str) -> Future[bool]:
        """Begin to bring an adapter into CPU memory and, where a row is free or idle, into it; returns at once.

        Whatever goes wrong is logged.

        Returns:
            Done when there is no more to do; whether the adapter is in memory.
        """
        is_there: Future[bool] = Future()
        self.adapters.borrow_soon(name).add_done_callback(functools.partial(self._fill_row, name, is_there))
        return is_there

    def _fill_row(self, name: str, is_there: Future[bool], borrowed: Future[GenerationHandle]) -> None:
        """Give what was borrowed a row of the LoRA buffers, if one is free, and give it back."""
        try:
            handle = borrowed.result()
        except AppError as error:
            logger.warning("event=prefetch_failed adapter=%s reason=%r", name, error.message)
            is_there.set_result(False)
            return
        slots = self.slots

        def fill() -> None:
            try:
                with handle:
                    if slots is not None:
                        slots.prefetch(handle.generation)
            finally:
                is_there.set_result(True)

        if not self._post(fill):
            handle.release()
            is_there.set_result(True)

    def _retire(self, digest: str) -> None:
        """Nobody has a way to this content any more: free its LoRA row and what its tower computed, between two steps."""
        slots = self.slots
        if slots is None:
            return
        slots.drop(digest)

        def collect() -> None:
            slots.collect()
            self._encoder_cache.drop_adapter(digest)

        self._post(collect)

    def _load_named(self, setting: str, module: LoRAModule) -> None:
        """Load an adapter that a setting names; faults say which setting it was."""
        try:
            self.adapters.load(module.name, module.path, load_inplace=True, base_model_name=module.base_model_name)
        except AppError as error:
            error.message = f"{setting}: {error.message}"
            raise

    def _make_rows(self, base: BaseModel, surface: ModelSurface, *, has_graphs: bool) -> None:
        """The LoRA buffers; what CUDA graphs read must be there before they are."""
        config = self._config
        buffers = make_buffers(config, base, surface, self.metadata)
        if base.split is not None and self._team is not None:
            from engine.parallel.rows import RowMirror

            self.num_bytes = buffers.num_bytes
            self.slots = SlotPool(config.max_loras, RowMirror(config, self._team, buffers, base.split))
            return
        extras = make_extra_writers(
            base, buffers, surface, self.metadata, num_slots=config.max_loras, has_graphs=has_graphs
        )
        self.num_bytes = buffers.num_bytes + sum(writer.num_bytes for writer in extras)
        self._slab_bytes = buffers.slab_bytes
        self.slots = SlotPool(config.max_loras, SlotWriters([buffers, *extras]))


def make_buffers(
    config: EngineConfig, base: BaseModel, surface: ModelSurface, metadata: Mapping[str, LoraMetadata]
) -> LoraBuffers:
    """The LoRA buffers of the model's linears, of this rank's sizes where it is split."""
    sites = {name: site for name, site in surface.linears.items() if surface.is_targeted(name)}
    make_group = None
    if base.split is not None:
        sites = {name: base.split.local_site(site) for name, site in sites.items()}
        if config.fully_sharded_loras:
            from engine.parallel.lora import make_group as make_sharded

            make_group = functools.partial(make_sharded, base.split)
    return LoraBuffers(
        base.model, sites, metadata, num_slots=config.max_loras, max_rank=config.max_lora_rank,
        dtype=surface.lora_dtype, make_group=make_group,
    )  # fmt: skip


def make_metadata(config: EngineConfig, base: BaseModel) -> dict[str, LoraMetadata]:
    """What says which tokens use which adapter, for each part of the model.

    Tower and connector see one adapter a call and token counts of their own, which need no tiles.
    """
    max_in = base.max_in_features
    head_rows = max(config.max_num_seqs, MAX_PROMPT_ROWS)
    tokens = {"decoder": config.max_num_batched_tokens, "head": head_rows, "tower": 1, "connector": 1}
    metadata_class = SlotMetadata if config.lora_extra_vocab_size else LoraMetadata
    return {
        part: metadata_class(
            max_tokens,
            config.max_loras,
            base.device,
            max_columns=3 * config.max_lora_rank,
            max_in=max_in,
            has_tiles=None if part in ("decoder", "head") else False,
        )
        for part, max_tokens in tokens.items()
    }
