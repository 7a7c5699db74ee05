"""Uploads: good ones in every packing, and archives that try something."""

from __future__ import annotations

import errno
import io
import random
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters import upload
from adapters.errors import AdapterError, StorageFull, UploadRefused, UploadTooLarge
from adapters.upload import unpack_upload

MIB = 1 << 20
CONFIG = b'{"peft_type": "LORA"}'
WEIGHTS = b"weights " * 100
GOOD = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def in_folder(folder: str) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in GOOD.items()}


def unpack(files: dict[str, bytes], target: Path, max_bytes: int = 64 * MIB) -> upload.Unpacked:
    target.mkdir(exist_ok=True)
    return unpack_upload(files, target, max_bytes=max_bytes)  # type: ignore[arg-type]


def written(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*")}


@pytest.mark.parametrize(
    "files",
    [
        {"x.zip": zip_of(GOOD)},
        {"no-extension": zip_of(GOOD)},
        {"x.zip": zip_of(in_folder("checkpoint"))},
        {"x.zip": zip_of(in_folder("out/checkpoint-100"))},
        {"x.zip": zip_of(in_folder("my lora (1)"))},
        {"x.zip": zip_of(in_folder("适配器"))},
        {"x.zip": zip_of({"notes.md": b"#", "optimizer.pt": b"x", "run.py": b"x", "deep/er/notes.txt": b"x"} | GOOD)},
        {"x.zip": zip_of({"__MACOSX/._adapter_config.json": b"junk", ".DS_Store": b"x", "a/.git/x.zip": b"x"} | GOOD)},
        {"x.zip": zip_of(in_folder("a") | {"__MACOSX/a/._adapter_config.json": b"x", "a/.cache/adapter_config.json": b"x"})},
        GOOD,
        in_folder("picked-folder"),
        GOOD | {"NOTES.md": b"#", ".DS_Store": b"x", "training_args.bin": b"x"},
    ],
)  # fmt: skip
def test_an_adapter_is_found_in_any_packing_and_only_its_files_are_written(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    unpacked = unpack(files, tmp_path / "target")
    assert written(tmp_path / "target") == GOOD and unpacked.files == sorted(GOOD)


def test_paths_and_open_files_can_be_uploaded(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zip_of(GOOD))
    (tmp_path / "a").mkdir()
    unpack_upload({"x.zip": tmp_path / "x.zip"}, tmp_path / "a", max_bytes=MIB)
    (tmp_path / "b").mkdir()
    with (tmp_path / "x.zip").open("rb") as file:
        unpack_upload({"x.zip": file}, tmp_path / "b", max_bytes=MIB)
    assert written(tmp_path / "a") == written(tmp_path / "b") == GOOD


def linked() -> bytes:
    buffer = io.BytesIO(zip_of(GOOD))
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = zipfile.ZipInfo("link.safetensors")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    return buffer.getvalue()


def doubled() -> bytes:
    buffer = io.BytesIO(zip_of(GOOD))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("adapter_config.json", b'{"r": 2}')
    return buffer.getvalue()


def encrypted() -> bytes:
    raw = bytearray(zip_of(GOOD))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        position = raw.find(magic)
        while position >= 0:
            raw[position + offset] |= 1
            position = raw.find(magic, position + 4)
    return bytes(raw)


def renamed(old: bytes, new: bytes) -> Callable[[], bytes]:
    """A name that `zipfile` would not write, put in afterwards."""
    assert len(old) == len(new)
    return lambda: zip_of(GOOD | {old.decode(): b"x"}).replace(old, new)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: zip_of(GOOD | {"../../evil.txt": b"x"}), "lead out of its folder"),
        (lambda: zip_of(GOOD | {"a/../../evil.txt": b"x"}), "lead out of its folder"),
        (lambda: zip_of({"../adapter_config.json": b"x"} | GOOD), "lead out of its folder"),
        (lambda: zip_of(GOOD | {"/abs.txt": b"x"}), "lead out of its folder"),
        (renamed(b"C__w.txt", b"C:\\w.txt"), "lead out of its folder"),
        (renamed(b"__MACOSX_x", b"__MACOSX\\x"), "lead out of its folder"),
        (lambda: zip_of(GOOD | {"C:w.txt": b"x"}), "lead out of its folder"),
        (renamed(b"nul_name.txt", b"nul\0name.txt"), "lead out of its folder"),
        (lambda: zip_of(GOOD | {"line\nbreak": b"x"}), "lead out of its folder"),
        (linked, "link or a device"),
        (doubled, "twice"),
        (lambda: zip_of(GOOD | {"Adapter_Config.JSON": b"x"}), "twice"),
        (encrypted, "encrypted"),
        (lambda: zip_of(GOOD | {"more.zip": zip_of(GOOD)}), "another archive"),
        (lambda: zip_of(GOOD | {"more.tar.gz": b"x"}), "another archive"),
        (lambda: zip_of(in_folder("a") | in_folder("b")), "holds 2 adapters ('a', 'b')"),
        (lambda: zip_of({"README.md": b"#"}), "no adapter_config.json"),
        (lambda: zip_of({}), "no adapter_config.json"),
        (lambda: zip_of({"adapter_config.json": CONFIG}), "no adapter_model.safetensors beside it"),
        (lambda: zip_of({"adapter_config.json": CONFIG, "b/x.safetensors": b"x"}), "no adapter_model.safetensors"),
        (lambda: zip_of({"adapter_config.json": CONFIG, "adapter_model.bin": b"x"}), "never opened"),
        (lambda: zip_of(GOOD)[:-40], "damaged"),
        (lambda: zip_of(GOOD)[:60], "damaged"),
        (lambda: zip_of(GOOD).replace(WEIGHTS[:0] + b"PK\x01\x02", b"PK\x01\x09"), "damaged"),
    ],
)  # fmt: skip
def test_a_suspicious_zip_is_refused_whole(make: Callable[[], bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(UploadRefused) as caught:
        unpack({"x.zip": make()}, tmp_path / "target")
    assert said in caught.value.message and str(tmp_path) not in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["target"], "nothing may land outside"
    assert set(written(tmp_path / "target")) <= set(GOOD)


def test_damaged_content_is_noticed(tmp_path: Path) -> None:
    raw = bytearray(zip_of({"adapter_config.json": CONFIG, "adapter_model.safetensors": bytes(range(256)) * 40}))
    position = raw.find(b"adapter_model.safetensors") + len("adapter_model.safetensors") + 20
    raw[position : position + 8] = b"\xff" * 8
    with pytest.raises(UploadRefused, match="damaged"):
        unpack({"x.zip": bytes(raw)}, tmp_path / "target")


def test_a_compression_bomb_is_refused_although_it_would_fit(tmp_path: Path) -> None:
    bomb = zip_of({"adapter_config.json": CONFIG, "adapter_model.safetensors": bytes(50 * MIB)})
    assert len(bomb) < MIB
    with pytest.raises(UploadTooLarge, match="would grow more than 100 times"):
        unpack({"x.zip": bomb}, tmp_path / "target", max_bytes=1024 * MIB)
    bomb = zip_of(GOOD | {"ignored.txt": bytes(50 * MIB)})
    with pytest.raises(UploadTooLarge):
        unpack({"x.zip": bomb}, tmp_path / "other", max_bytes=1024 * MIB)


def test_a_header_that_lies_about_the_size_lets_no_more_through(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    raw = zip_of({"adapter_config.json": CONFIG, "adapter_model.safetensors": content})
    lying = raw.replace(struct.pack("<L", len(content)), struct.pack("<L", 1000))
    assert lying != raw
    with pytest.raises(AdapterError):
        unpack({"x.zip": lying}, tmp_path / "target", max_bytes=MIB)
    assert sum(len(data) for data in written(tmp_path / "target").values()) <= MIB


NOISE = {"adapter_config.json": CONFIG, "adapter_model.safetensors": random.Random(0).randbytes(2 * MIB)}


@pytest.mark.parametrize("files", [{"x.zip": zip_of(NOISE)}, NOISE])
def test_more_bytes_than_the_limit_are_refused_with_the_flag(files: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(UploadTooLarge, match="--max-upload-mb") as caught:
        unpack(files, tmp_path / "target", max_bytes=MIB)
    assert caught.value.status == 413


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UploadTooLarge, match="1002 entries"):
        unpack({"x.zip": zip_of(GOOD | {f"{number}.txt": b"" for number in range(1000)})}, tmp_path / "target")


def test_a_huge_table_of_contents_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = zip_of(GOOD | {f"{number}.txt": b"" for number in range(10)})
    monkeypatch.setattr(upload, "MAX_DIRECTORY_LEN", 200)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(UploadTooLarge, match="table of contents"):
        unpack({"x.zip": raw}, tmp_path / "target")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "empty"),
        (GOOD | {"x.zip": zip_of(GOOD)}, "a zip among other files"),
        (GOOD | {"../x.safetensors": b"x"}, "lead out of its folder"),
        (GOOD | {"/etc/x.safetensors": b"x"}, "lead out of its folder"),
        (GOOD | {"Adapter_Model.safetensors": b"x"}, "twice, in different letters"),
        (in_folder("a") | in_folder("b"), "holds 2 adapters"),
        ({"adapter_model.safetensors": b"x"}, "no adapter_config.json"),
        ({"adapter_config.json": CONFIG, "adapter_model.bin": b"x"}, "never opened"),
    ],
)
def test_suspicious_loose_files_are_refused(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(UploadRefused) as caught:
        unpack(files, tmp_path / "target")
    assert said in caught.value.message


def test_shards_and_their_index_are_kept(tmp_path: Path) -> None:
    files = {
        "adapter_config.json": CONFIG,
        "adapter_model-00001-of-00002.safetensors": b"1",
        "adapter_model-00002-of-00002.safetensors": b"2",
        "adapter_model.safetensors.index.json": b"{}",
    }
    unpack({"x.zip": zip_of(files)}, tmp_path / "target")
    assert written(tmp_path / "target") == files


def test_an_unusual_compression_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        for name, content in GOOD.items():
            archive.writestr(name, content)
    with pytest.raises(UploadRefused, match="unusual compression"):
        unpack({"x.zip": buffer.getvalue()}, tmp_path / "target")


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")


@pytest.mark.parametrize("files", [{"x.zip": zip_of(GOOD)}, GOOD])
def test_a_full_disk_is_a_507_that_blames_nobody(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "open", lambda *_: FullDisk(), raising=False)
    with pytest.raises(StorageFull, match="the disk is full") as caught:
        unpack(files, tmp_path / "target")
    assert caught.value.status == 507 and "secret" not in caught.value.message
