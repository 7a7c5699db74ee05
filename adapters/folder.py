"""Finds and opens the files of a PEFT folder: `adapter_config.json` and its safetensors, one file or sharded.

Never opens a pickle. Messages name files inside the folder, never the folder's own path. Called by `weights`.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.errors import AdapterFilesNotFound, AdapterRefused
from adapters.mlx import WEIGHTS_NAME as MLX_WEIGHTS_NAME
from adapters.mlx import is_mlx_config
from adapters.places import TensorPlace
from adapters.tensor_file import TensorFile

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
NEW_EMBEDDINGS_NAME = "new_embeddings.safetensors"
NEW_EMBEDDINGS_PICKLE = "new_embeddings.bin"
MAX_JSON_LEN = 16 << 20
MAX_SHARDS = 256

PICKLE_REMEDY = (
    "a pickle file can run code when it is opened, so it is never opened here; convert it where you trust it: "
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file({k: v.contiguous() for k, v in torch.load('adapter_model.bin', map_location='cpu', "
    "weights_only=True).items()}, 'adapter_model.safetensors')\""
)


class AdapterFolder:
    """An adapter's folder with its files open; a context manager.

    Attributes:
        config: the parsed `adapter_config.json`.
        tensors: tensor name -> where it is.
        added_rows: the same for `new_embeddings.safetensors`, which old servers read added tokens from; mostly empty.
    Raises `AdapterFilesNotFound` where there is no adapter, `AdapterRefused` where there is one that cannot be read.
    """

    def __init__(self, folder: Path, *, allowed_roots: Sequence[Path] | None = None) -> None:
        self._folder = folder
        self._allowed_roots = allowed_roots
        self._stack = ExitStack()
        if not folder.is_dir():
            raise AdapterFilesNotFound(
                "no adapter was found there: the path is not a folder, or does not exist; give the folder with "
                f"{CONFIG_NAME} in it"
            )
        if not self._exists(CONFIG_NAME):
            raise AdapterFilesNotFound(
                f"no adapter was found there: the folder has no {CONFIG_NAME}{self._other_model_hint()}{self._subfolder_hint()}"
            )
        self.config = self._read_json(CONFIG_NAME)
        if self._exists(NEW_EMBEDDINGS_PICKLE) and not self._exists(NEW_EMBEDDINGS_NAME):
            raise AdapterRefused([f"{NEW_EMBEDDINGS_PICKLE} holds added token embeddings: {PICKLE_REMEDY}"])
        try:
            self.tensors: dict[str, TensorPlace] = self._open_tensors()
            self.added_rows = self._add_file(NEW_EMBEDDINGS_NAME, {}) if self._exists(NEW_EMBEDDINGS_NAME) else {}
        except BaseException:
            self._stack.close()
            raise

    def check_unchanged(self) -> None:
        """Raise `AdapterRefused` if a weight file was written to since it was opened."""
        for file in {
            id(place.file): place.file for place in [*self.tensors.values(), *self.added_rows.values()]
        }.values():
            file.check_unchanged()

    def read_start(self, name: str, max_len: int) -> bytes:
        """The first bytes of a file beside the tensors, as the function of this name gives them."""
        return read_start(self._folder, name, max_len, self._allowed_roots)

    def __enter__(self) -> AdapterFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _path(self, name: str) -> Path:
        """The file's path; refuses links that lead out of the allowed roots."""
        path = self._folder / name
        if self._allowed_roots is not None and not is_under(path, self._allowed_roots):
            raise AdapterRefused([f"{name} is a link that leads out of the folders that adapters may be loaded from"])
        return path

    def _read_json(self, name: str) -> Any:
        path = self._path(name)
        if not stat.S_ISREG(os.stat(path).st_mode) or path.stat().st_size > MAX_JSON_LEN:
            raise AdapterRefused([f"{name} is not a regular file of at most {MAX_JSON_LEN >> 20} MiB"])
        try:
            return json.loads(path.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            detail = str(error) if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
            raise AdapterRefused([f"{name} is not JSON: {detail}"]) from None

    def _open_tensors(self) -> dict[str, TensorPlace]:
        if self._exists(WEIGHTS_NAME):
            return self._add_file(WEIGHTS_NAME, {})
        if self._exists(INDEX_NAME):
            return self._open_shards()
        if is_mlx_config(self.config) and self._exists(MLX_WEIGHTS_NAME):
            return self._add_file(MLX_WEIGHTS_NAME, {})
        raise AdapterRefused([self._why_no_weights()])

    def _open_shards(self) -> dict[str, TensorPlace]:
        index = self._read_json(INDEX_NAME)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise AdapterRefused([f"{INDEX_NAME} has no weight_map from tensor names to file names"])
        shards = sorted(set(weight_map.values()))
        if len(shards) > MAX_SHARDS:
            raise AdapterRefused([f"{INDEX_NAME} lists {len(shards)} files, over the limit of {MAX_SHARDS}"])
        tensors: dict[str, TensorPlace] = {}
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise AdapterRefused(
                    [f"{INDEX_NAME} lists {shard[:80]!r}, which is not a safetensors file of this folder"]
                )
            if not self._exists(shard):
                raise AdapterRefused([f"{INDEX_NAME} lists {shard[:80]}, but the folder does not hold it"])
            self._add_file(shard, tensors)
        for key, shard in weight_map.items():
            if key not in tensors or tensors[key].file.name != shard:
                raise AdapterRefused([f"{INDEX_NAME} places {key[:200]!r} in {shard[:80]}, which does not hold it"])
        extra = next((key for key in tensors if key not in weight_map), None)
        if extra is not None:
            raise AdapterRefused(
                [f"{tensors[extra].file.name} holds {extra[:200]!r}, which {INDEX_NAME} does not list"]
            )
        return tensors

    def _add_file(self, name: str, tensors: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
        file = self._stack.enter_context(TensorFile(self._path(name)))
        for key, entry in file.entries.items():
            if key in tensors:
                raise AdapterRefused([f"both {tensors[key].file.name} and {name} hold {key[:200]!r}"])
            tensors[key] = TensorPlace(file, entry)
        return tensors

    def _other_model_hint(self) -> str:
        """Where the folder holds a whole model: what that is for."""
        return ", but a model's config.json, which --model serves" if self._exists("config.json") else ""

    def _subfolder_hint(self) -> str:
        """Where the folder holds adapters one level down, as PEFT saves several at once: which to choose."""
        names = sorted(path.parent.name for path in self._folder.glob(f"*/{CONFIG_NAME}"))
        return f"; its sub-folders {', '.join(names[:5])} have one, name one of them" if names else ""

    def _why_no_weights(self) -> str:
        for name in PICKLE_NAMES:
            if self._exists(name):
                return f"the folder has {name} but no {WEIGHTS_NAME}: {PICKLE_REMEDY}"
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if others:
            return (
                f"the folder has no {WEIGHTS_NAME} and no {INDEX_NAME}, only {', '.join(others[:3])}; give the file "
                "the name that PEFT uses, or add the index of the shards"
            )
        return f"the folder has {CONFIG_NAME} but no {WEIGHTS_NAME}"


Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of the last change (ns) and size (bytes) of each file in a folder, by name."""
_COARSEST_CLOCK_NS = 2 * 10**9


def stamp_of(folder: Path) -> Stamp | None:
    """What tells cheaply whether a folder's files are those of before.

    None where it cannot be read, or was written to just now: file systems tell times so coarsely (two seconds at worst) that
    another write might go unseen.
    """
    try:
        with os.scandir(folder) as entries:
            stats = sorted((entry.name, entry.stat()) for entry in entries)
    except OSError:
        return None
    stamp = tuple((name, status.st_mtime_ns, status.st_size) for name, status in stats)
    newest = max((changed_at for _, changed_at, _ in stamp), default=0)
    return stamp if time.time_ns() - newest > _COARSEST_CLOCK_NS else None


def read_start(folder: Path, name: str, max_len: int, allowed_roots: Sequence[Path] | None) -> bytes:
    """The first `max_len` bytes of a file that an adapter does not depend on; none where it is not there or not to be read."""
    path = folder / name
    try:
        is_inside = allowed_roots is None or is_under(path, allowed_roots)
        if not is_inside or not stat.S_ISREG(path.stat().st_mode):
            return b""
        with path.open("rb") as file:
            return file.read(max_len)
    except OSError:
        return b""


def is_under(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, with all links followed, lies in one of `roots`."""
    resolved = path.resolve()
    return any(resolved == root.resolve() or root.resolve() in resolved.parents for root in roots)
