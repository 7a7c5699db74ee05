"""Unpacks an uploaded adapter, a zip or loose files, into a fresh folder, trusting nothing.

Only files that an adapter consists of are ever written, under names that are checked one by one, with limits counted on
the bytes that really come out. Anything suspicious refuses the whole upload. Knows nothing of tensors. Called by
`manager`.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from adapters.card import CARD_NAME
from adapters.errors import UploadRefused, UploadTooLarge
from adapters.folder import CONFIG_NAME, PICKLE_NAMES, PICKLE_REMEDY
from adapters.readme import README_NAME
from adapters.storage import storage_faults
from adapters.tokenizer_files import TOKENIZER_NAMES

UploadFiles = Mapping[str, "Path | bytes | BinaryIO"]

MAX_ENTRIES = 1000
MAX_DIRECTORY_LEN = 4 << 20
MAX_RATIO = 100
# below this many bytes, any compression ratio is harmless
RATIO_FREE_BYTES = 1 << 20
CHUNK_LEN = 1 << 20

_ALLOWED = re.compile(
    r"adapter_config\.json|[A-Za-z0-9._ -]+\.safetensors|[A-Za-z0-9._ -]+\.safetensors\.index\.json|"
    + "|".join(map(re.escape, (CARD_NAME, README_NAME, *TOKENIZER_NAMES)))
)
_DRIVE = re.compile(r"[A-Za-z]:")
_NESTED = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")


@dataclass(frozen=True)
class ProbeReport:
    """How much an adapter changes the base model's answers to a few fixed prompts.

    Attributes:
        mean_kl: mean of KL(adapter || base) over positions, in nats; None where nothing was measured.
        top1_changed: share of positions, 0 to 1, whose likeliest token is another; None likewise.
        num_tokens: positions compared.
        verdict: `no effect`, `slight effect`, `effect`, `broken` (its numbers are not finite) or `not measured`.
    """

    mean_kl: float | None
    top1_changed: float | None
    num_tokens: int
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class UploadReport:
    """What an upload holds and whether it could be served; nothing of it was kept.

    Attributes:
        is_ok: it would be served.
        errors: why not, one sentence each.
        code: machine-readable kind of the first error, or None.
        files: file names that would be stored.
        ignored: file names that would not.
        report: `AdapterReport.to_dict()` where it is ok.
        probe: what it changes, where it is ok and could be tried.
    """

    is_ok: bool
    errors: list[str] = field(default_factory=list)
    code: str | None = None
    files: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None
    probe: ProbeReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass
class Unpacked:
    """What an upload held: names that were written, and names that were not."""

    files: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def unpack_upload(files: UploadFiles, target: Path, *, max_bytes: int) -> Unpacked:
    """Write an upload's adapter files into `target`, an empty folder.

    Raises `UploadTooLarge` over a limit, `StorageFull` where the disk is full, and `UploadRefused` for everything else;
    `target` may then hold some files.
    """
    if not files:
        raise UploadRefused(f"the upload is empty; send a zip, or {CONFIG_NAME} and adapter_model.safetensors")
    with storage_faults("uploads"), ExitStack() as stack:
        opened = {name: _open(source, stack) for name, source in files.items()}
        zips = [name for name, file in opened.items() if _is_zip(file)]
        budget = _Budget(max_bytes)
        if not zips:
            return _copy_loose(opened, target, budget)
        if len(opened) > 1:
            raise UploadRefused(
                f"{_shown(zips[0])} is a zip among other files; send one zip, or loose files without a zip"
            )
        return _unzip(opened[zips[0]], target, budget)


class _Budget:
    """Counts bytes that come out, over the whole upload."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def spend(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.check(self.num_bytes)

    def check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise UploadTooLarge(
                f"the upload is over the limit of {_mib(self.max_bytes)}; allow a larger one with --max-upload-mb"
            )


def _open(source: Path | bytes | BinaryIO, stack: ExitStack) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if isinstance(source, Path):
        return stack.enter_context(source.open("rb"))
    return source


def _is_zip(file: BinaryIO) -> bool:
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    return magic in _ZIP_MAGIC


def _copy_loose(opened: Mapping[str, BinaryIO], target: Path, budget: _Budget) -> Unpacked:
    if len(opened) > MAX_ENTRIES:
        raise UploadTooLarge(f"the upload has {len(opened)} files, over the limit of {MAX_ENTRIES}")
    seen: set[str] = set()
    for name in opened:
        _check_name(name)
        if name.lower() in seen:
            raise UploadRefused(f"the upload holds {_shown(name)} twice, in different letters; send it once")
        seen.add(name.lower())
    names = {name: name for name in opened if not _is_hidden(name)}
    members = _choose(names)
    for name, leaf in members.items():
        with open(target / leaf, "xb") as output:
            _copy(opened[name], output, budget)
    return Unpacked(sorted(members.values()), sorted(set(opened) - set(members)))


def _unzip(file: BinaryIO, target: Path, budget: _Budget) -> Unpacked:
    size = file.seek(0, io.SEEK_END)
    budget.check(size)
    _check_directory(file, size)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check_entries(entries, budget)
            by_name = {entry.filename: entry for entry in entries if not entry.is_dir()}
            members = _choose({name: name for name in by_name if not _is_hidden(name)})
            for name, leaf in members.items():
                with archive.open(by_name[name]) as source, open(target / leaf, "xb") as output:
                    _copy(source, output, budget, compressed_len=by_name[name].compress_size)
            return Unpacked(sorted(members.values()), sorted(set(by_name) - set(members)))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, OverflowError) as error:
        raise UploadRefused(f"the zip is damaged or of an unknown kind ({_shown(str(error))}); make it again") from None


def _check_directory(file: BinaryIO, size: int) -> None:
    """Bound the archive's table of contents before `zipfile` reads all of it into memory."""
    tail_len = min(size, 65_557 + 76)
    file.seek(size - tail_len)
    tail = file.read(tail_len)
    position = len(tail) - 22
    if position < 0 or tail[position : position + 4] != b"PK\x05\x06" or tail[-2:] != b"\0\0":
        position = tail.rfind(b"PK\x05\x06")
    if position < 0 or len(tail) < position + 22:
        raise UploadRefused("the zip is damaged: it has no table of contents; make it again")
    (directory_len,) = struct.unpack_from("<L", tail, position + 12)
    if tail[max(position - 20, 0) : position].startswith(b"PK\x06\x07"):
        wide = tail.rfind(b"PK\x06\x06", 0, position)
        directory_len = struct.unpack_from("<Q", tail, wide + 40)[0] if wide >= 0 else MAX_DIRECTORY_LEN + 1
    if directory_len > MAX_DIRECTORY_LEN:
        raise UploadTooLarge(f"the zip's table of contents is over the limit of {_mib(MAX_DIRECTORY_LEN)}")
    file.seek(0)


def _check_entries(entries: list[zipfile.ZipInfo], budget: _Budget) -> None:
    """Refuse an archive for any entry, also one that would not be unpacked."""
    if len(entries) > MAX_ENTRIES:
        raise UploadTooLarge(f"the zip has {len(entries)} entries, over the limit of {MAX_ENTRIES}")
    seen: set[str] = set()
    for entry in entries:
        _check_name(entry.orig_filename)
        name = entry.filename.rstrip("/").lower()
        if name in seen:
            raise UploadRefused(f"the zip holds {_shown(entry.filename)} twice; make it again with each file once")
        seen.add(name)
        if entry.flag_bits & 0x1:
            raise UploadRefused("the zip is encrypted; upload one without a password")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UploadRefused("the zip uses an unusual compression; make it again with the usual one (deflate)")
        file_type = stat.S_IFMT(entry.external_attr >> 16)
        if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise UploadRefused(f"the zip's entry {_shown(entry.filename)} is a link or a device; send plain files")
        if name.endswith(_NESTED) and not entry.is_dir() and not _is_hidden(entry.filename):
            raise UploadRefused(f"the zip holds another archive, {_shown(entry.filename)}; send the adapter's files")
        _check_ratio(entry.file_size, entry.compress_size)
    budget.check(sum(entry.file_size for entry in entries))


def _check_ratio(num_bytes: int, compressed_len: int) -> None:
    if num_bytes > RATIO_FREE_BYTES and num_bytes > MAX_RATIO * max(compressed_len, 1):
        raise UploadTooLarge(
            f"the zip holds a file that would grow more than {MAX_RATIO} times; pack the adapter's own files only"
        )


def _check_name(name: str) -> None:
    """Refuse names that try to leave the folder; tools disagree on how to read them, so none of them is repaired."""
    parts = name.replace("\\", "/").split("/")
    is_bad = (
        not name
        or "\\" in name
        or name.startswith("/")
        or _DRIVE.match(name) is not None
        or ".." in parts
        or any(ord(character) < 32 or ord(character) == 127 for character in name)
        or len(name) > 1024
    )
    if is_bad:
        raise UploadRefused(f"the upload holds a file called {_shown(name)}, a name that could lead out of its folder")


def _is_hidden(name: str) -> bool:
    """What file managers add: `__MACOSX` and dot files."""
    return any(part == "__MACOSX" or part.startswith(".") for part in name.split("/"))


def _choose(names: Mapping[str, str]) -> dict[str, str]:
    """Full name -> file name for the files of the one adapter in the upload."""
    configs = [name for name in names if name.rpartition("/")[2] == CONFIG_NAME]
    if not configs:
        raise UploadRefused(f"the upload holds no {CONFIG_NAME}; send the whole adapter folder")
    if len(configs) > 1:
        folders = ", ".join(_shown(name.rpartition("/")[0] or "top level") for name in configs[:5])
        raise UploadRefused(f"the upload holds {len(configs)} adapters ({folders}); send one at a time")
    folder = configs[0].rpartition("/")[0]
    members: dict[str, str] = {}
    for name in names:
        parent, _, leaf = name.rpartition("/")
        if parent == folder and _ALLOWED.fullmatch(leaf):
            members[name] = leaf
    if not any(leaf.endswith(".safetensors") for leaf in members.values()):
        leaves = {name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == folder}
        pickle = next((name for name in PICKLE_NAMES if name in leaves), None)
        if pickle is not None:
            raise UploadRefused(f"the upload has {pickle} but no adapter_model.safetensors: {PICKLE_REMEDY}")
        raise UploadRefused(
            f"the upload has {CONFIG_NAME} but no adapter_model.safetensors beside it; send the whole adapter folder"
        )
    return members


def _copy(source: IO[bytes], output: IO[bytes], budget: _Budget, *, compressed_len: int | None = None) -> None:
    num_bytes = 0
    while chunk := source.read(CHUNK_LEN):
        num_bytes += len(chunk)
        budget.spend(len(chunk))
        if compressed_len is not None:
            _check_ratio(num_bytes, compressed_len)
        output.write(chunk)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.6g} MiB"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
