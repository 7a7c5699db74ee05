"""The slab: what lies in it is what was stored, however it is read; its digest follows the content alone."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapters.slab
from adapters.digest import content_hash
from adapters.errors import AdapterRefused
from adapters.folder import AdapterFolder
from adapters.intake import read_generation
from adapters.manager import AdapterManager
from adapters.plan import plan_adapter
from adapters.slab import Half, _reading_threads, read_slab
from adapters.slab_pool import fresh_memory
from adapters.surface import ModelSurface
from adapters.weights import read_adapter
from tests.adapters.world import edit

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def save_mixed(reference: Path, folder: Path, dtypes: list[torch.dtype], alpha: float = 8.0) -> Path:
    """The reference adapter with its tensors stored in these types, in turn."""

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensors[name].to(dtypes[index % len(dtypes)]) for index, name in enumerate(sorted(tensors))}

    return edit(reference, folder, tensors=convert, config={"lora_alpha": alpha})


@pytest.mark.parametrize("serving", DTYPES[1:])
@pytest.mark.parametrize("stored", [*([dtype] for dtype in DTYPES), [torch.float32, torch.bfloat16, torch.float16]])
@pytest.mark.parametrize("alpha", [4.0, 9.3, -1.0])
def test_pairs_are_the_stored_numbers_scaled_in_float32_and_rounded_once(
    reference: Path,
    surface: ModelSurface,
    tmp_path: Path,
    stored: list[torch.dtype],
    serving: torch.dtype,
    alpha: float,
) -> None:
    folder = save_mixed(reference, tmp_path / "x", stored, alpha)
    pairs = read_adapter(folder, replace(surface, lora_dtype=serving)).pairs
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(pairs) == 4
    for name, pair in pairs.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        assert torch.equal(pair.a, a.to(serving)) and pair.a.dtype == serving
        assert torch.equal(pair.b, b.to(serving) if alpha == 4.0 else (b.float() * (alpha / 4)).to(serving))


def test_all_pairs_are_aligned_views_of_one_storage(reference: Path, surface: ModelSurface) -> None:
    _, pairs, report, _ = read_adapter(reference, surface)
    halves = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    assert len({half.untyped_storage().data_ptr() for half in halves}) == 1
    assert all(half.storage_offset() % adapters.slab.ALIGNMENT == 0 and half.is_contiguous() for half in halves)
    assert report.num_bytes == sum(half.nbytes for half in halves) <= halves[0].untyped_storage().nbytes()


def read_with(folder: Path, surface: ModelSurface, max_threads: int) -> tuple[list[Half], list[bytes]]:
    with AdapterFolder(folder) as files:
        plan = plan_adapter(files, surface)
        halves = [Half(place, scale) for pair in plan.pairs.values() for place, scale in ((pair.a, 1.0), (pair.b, 3.0))]
        return halves, read_slab(halves, surface.lora_dtype, max_threads=max_threads)


@pytest.mark.parametrize("piece_bytes", [600, 4096])
@pytest.mark.parametrize("max_threads", [2, 5])
def test_the_number_of_threads_changes_nothing(
    reference: Path, surface: ModelSurface, monkeypatch: pytest.MonkeyPatch, max_threads: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(adapters.slab, "PIECE_BYTES", piece_bytes)
    (whole, hashes), (shared, same_hashes) = (read_with(reference, surface, num) for num in (1, max_threads))
    stored = load_file(reference / "adapter_model.safetensors")
    for one, other in zip(whole, shared, strict=True):
        assert torch.equal(one.tensor, other.tensor) and torch.equal(one.tensor, stored[one.place.name] * one.factor)
    raw = [stored[half.place.name].numpy().tobytes() for half in sorted(whole, key=lambda half: half.factor)]
    num_a = sum(half.factor == 1.0 for half in whole)
    expected = []
    for run in (b"".join(raw[:num_a]), b"".join(raw[num_a:])):
        expected += [hashlib.sha256(run[i : i + piece_bytes]).digest() for i in range(0, len(run), piece_bytes)]
    assert hashes == same_hashes == expected and len(hashes) >= 2


def test_the_digest_does_not_follow_the_order_in_the_file_and_does_follow_a_single_bit(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    digest = read_adapter(reference, surface)[2].digest
    rows = load_file(reference / "adapter_model.safetensors")
    swapped = tmp_path / "swapped"
    shutil.copytree(reference, swapped)
    write_reversed(rows, swapped / "adapter_model.safetensors")
    assert (swapped / "adapter_model.safetensors").read_bytes() != (
        reference / "adapter_model.safetensors"
    ).read_bytes()
    assert read_adapter(swapped, surface)[2].digest == digest
    for name in rows:
        changed = {key: tensor.clone() for key, tensor in rows.items()}
        changed[name].view(torch.int32).view(-1)[-1] ^= 1
        save_file(changed, swapped / "adapter_model.safetensors")
        assert read_adapter(swapped, surface)[2].digest != digest


def test_the_digest_is_that_of_the_plans_facts_as_json_and_of_the_numbers(
    reference: Path, surface: ModelSurface
) -> None:
    with AdapterFolder(reference) as files:
        plan = plan_adapter(files, surface)
    pairs = {
        name: replace(pair, site=replace(pair.site, name='a"\\é\n.q_proj'), scale=scale)
        for (name, pair), scale in zip(plan.pairs.items(), (2.0, -1e-05, 0.1 + 0.2, 3e22), strict=True)
    }
    expected = hashlib.sha256(b"switchboard adapter content 2\n")
    for pair in pairs.values():
        for place in (pair.a, pair.b):
            expected.update(json.dumps([pair.site.name, place.dtype, place.shape, repr(pair.scale)]).encode())
    expected.update(b"12")
    assert content_hash(replace(plan, pairs=pairs), [b"1", b"2"]).digest() == expected.digest()


def write_reversed(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file with the tensors' bytes in the reverse order of their names."""
    header, body = {}, b""
    for name in sorted(tensors, reverse=True):
        raw = tensors[name].numpy().tobytes()
        header[name] = {
            "dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [len(body), len(body) + len(raw)],
        }  # fmt: skip
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_are_found_in_every_stored_type(
    reference: Path, surface: ModelSurface, tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors[max(tensors)][-1, -1] = value
        return tensors

    folder = edit(reference, tmp_path / "x", tensors=spoil)
    with pytest.raises(AdapterRefused, match=r"layers\.1\.self_attn\.v_proj\.lora_B\.weight holds NaN or infinity"):
        read_adapter(folder, surface)


def test_a_reader_that_fails_is_heard_after_all_have_ended(
    reference: Path, surface: ModelSurface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters.slab, "PIECE_BYTES", 64)
    num_read = 0

    class Failing:
        name, shape, dtype, extent = "x", (4, 64), "F32", None

        def read_into(self, memory: memoryview) -> None:
            raise OSError("disk")

    class Counting(Failing):
        def read_into(self, memory: memoryview) -> None:
            nonlocal num_read
            num_read += 1

    with pytest.raises(OSError, match="disk"):
        read_slab([Half(Failing(), 1.0), *(Half(Counting(), 1.0) for _ in range(9))], torch.float32)
    assert num_read == 9


def test_threads_and_jobs_keep_nothing_of_an_adapter(
    reference: Path, surface: ModelSurface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters.slab, "PIECE_BYTES", 64)
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(num_bytes: int) -> torch.Tensor:
        tensor = fresh_memory(num_bytes)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(adapters.slab, "fresh_memory", watched)
    generation = read_generation(reference, replace(surface, lora_dtype=torch.bfloat16), memory=watched)
    halves = [weakref.ref(half) for pair in generation.pairs.values() for half in (pair.a, pair.b)]
    assert len(made) == 3 and all(half() is not None for half in halves)  # the slab, and scratch for A and for B
    del generation
    gc.collect()
    assert all(tensor() is None for tensor in (*halves, *made))


def first_format(folder: Path, surface: ModelSurface) -> str:
    """The digest as the first version of the program computed it, written out again."""
    digest = hashlib.sha256()
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, pair in sorted(read_adapter(folder, surface)[1].items()):
        for half in "AB":
            tensor = tensors[f"base_model.model.{name}.lora_{half}.weight"]
            digest.update(json.dumps([name, "F32", list(tensor.shape), repr(pair.scale)]).encode())
            digest.update(tensor.numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def test_a_catalogue_of_the_first_format_goes_on_and_still_notices_changes(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    def manager() -> AdapterManager:
        return AdapterManager(surface, adapter_dir=tmp_path / "dir", max_cpu_loras=2)

    files = {path.name: path.read_bytes() for path in reference.iterdir() if path.name != "README.md"}
    old = first_format(reference, surface)
    first = manager()
    new = first.install_upload("sql", files).generation
    assert new != old
    first._door.open().catalog._db.execute("UPDATE versions SET digest = ?", (old,))
    first.close()

    second = manager()
    second.restore()
    with second.acquire("sql") as handle:
        assert handle.generation.digest == handle.generation.report.digest == old == second.get("sql").generation
    assert second.rollback("sql", old).generation == old
    second.check_integrity()
    second.close()

    weights = next((tmp_path / "dir").glob("adapters/*/adapter_model.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    third = manager()
    third.restore()
    with pytest.raises(AdapterRefused, match="changed after it was loaded"):
        third.acquire("sql")
    third.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_reads_with_threads_of_its_own() -> None:
    before = _reading_threads().submit(int)
    assert before.result(5) == 0
    child = os.fork()
    if child == 0:
        try:
            os._exit(_reading_threads().submit(int, "7").result(5))
        except BaseException:  # noqa: BLE001 - the child must not go on with the parent's tests
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
