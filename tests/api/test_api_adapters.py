"""Adapters over HTTP: cards, load, replace, unload, upload, pin, roll back and delete."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine import Engine
from tests.api.conftest import Serve

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _same_adapters_afterwards(tiny_engine: Engine) -> Iterator[None]:
    before = set(tiny_engine.adapters.names())
    yield
    for name in set(tiny_engine.adapters.names()) - before:
        tiny_engine.adapters.delete(name)
    assert set(tiny_engine.adapters.names()) == before


def load(http: httpx.Client, name: Any, path: Any, **fields: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def unload(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json=fields)


def names(http: httpx.Client) -> list[str]:
    return [card["id"] for card in http.get("/v1/models").json()["data"]]


def error(answer: httpx.Response) -> tuple[int, str | None]:
    body = answer.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    return answer.status_code, body["param"]


def zipped(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"inner/{path.name}")
    return buffer.getvalue()


def test_models_are_the_base_and_the_adapters_with_their_lineage(
    http: httpx.Client, client: openai.OpenAI, base_model: str, tiny_engine: Engine, speech_adapters: dict[str, Path]
) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    base, speech = cards[base_model], cards["speech"]
    common = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission", "lora"}
    assert base.keys() == speech.keys() == common
    assert (base["parent"], base["root"], base["lora"]) == (None, tiny_engine.config.model, None)
    assert (speech["parent"], speech["root"]) == (base_model, str(speech_adapters["speech"]))
    assert http.get("/v1/adapters/speech").json()["parent"] == speech["parent"]
    listed = {adapter["id"]: adapter["parent"] for adapter in http.get("/v1/adapters").json()["data"]}
    assert listed == {name: card["parent"] for name, card in cards.items() if name != base_model}
    assert base["max_model_len"] == speech["max_model_len"] == 512
    assert base["permission"][0]["object"] == "model_permission"
    lora = speech["lora"]
    assert (lora["rank"], lora["alpha"], lora["scale"], lora["default_for"]) == (8, 8.0, 1.0, ["audio"])
    assert lora["target_modules"] == ["q_proj", "v_proj"]
    assert lora["generation"].startswith("sha256:")
    assert lora["state"] in ("cpu", "gpu") and lora["pinned"] is True and lora["bytes"] > 0
    assert {model.id for model in client.models.list()} == cards.keys()
    assert client.models.retrieve("speech").id == "speech"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_load_use_replace_and_unload(
    http: httpx.Client, client: openai.OpenAI, base_model: str, speech_adapters: dict[str, Path]
) -> None:
    def text(model: str) -> str | None:
        answer = client.chat.completions.create(model=model, messages=HI, temperature=0, max_tokens=12)
        return answer.choices[0].message.content

    answer = load(http, "mine", speech_adapters["style"])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert names(http)[-1] == "mine"
    assert text("mine") == text("style") != text(base_model)
    assert error(load(http, "mine", speech_adapters["tower"])) == (400, "lora_name")
    assert text("mine") == text("style")
    assert load(http, "mine", speech_adapters["tower"], load_inplace=True).status_code == 200
    assert text("mine") == text("tower") != text("style")
    answer = unload(http, lora_name="mine")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert "mine" not in names(http)
    with pytest.raises(openai.NotFoundError):
        text("mine")


def test_unload_by_number(http: httpx.Client, adapter_folder: Path) -> None:
    assert load(http, "mine", adapter_folder).status_code == 200
    number = http.get("/v1/adapters/mine").json()["lora_int_id"]
    assert error(unload(http, lora_name="style", lora_int_id=number)) == (400, "lora_int_id")
    assert "removed" in unload(http, lora_int_id=number).text
    assert error(unload(http, lora_int_id=number)) == (404, "lora_int_id")


def test_load_faults_have_the_right_status_and_leave_nothing_behind(
    http: httpx.Client, base_model: str, adapter_folder: Path, tmp_path: Path
) -> None:
    before = names(http)
    bad_json, no_tensors, truncated, dora = (tmp_path / name for name in ("json", "none", "cut", "dora"))
    for folder in (bad_json, no_tensors, truncated, dora):
        shutil.copytree(adapter_folder, folder)
    (bad_json / "adapter_config.json").write_text("{")
    (no_tensors / "adapter_model.safetensors").unlink()
    weights = (truncated / "adapter_model.safetensors").read_bytes()
    (truncated / "adapter_model.safetensors").write_bytes(weights[:-100])
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert load(http, "x", tmp_path / "nowhere").status_code == 404
    for folder in (bad_json, truncated, dora):
        answer = load(http, "x", folder)
        assert answer.status_code == 400, answer.text
        assert str(tmp_path) not in answer.text and "Traceback" not in answer.text
    assert load(http, "x", no_tensors).status_code in (400, 404)
    assert error(load(http, base_model, adapter_folder)) == (400, "lora_name")
    assert error(load(http, "none", adapter_folder)) == (400, "lora_name")
    assert error(load(http, "", adapter_folder)) == (400, "lora_name")
    assert error(load(http, "x", "")) == (400, "lora_path")
    assert error(load(http, "x", adapter_folder, load_inplace="yes")) == (400, "load_inplace")
    assert error(load(http, "x", adapter_folder, is_3d_lora_weight=True)) == (400, "is_3d_lora_weight")
    assert error(http.post("/v1/load_lora_adapter", json={"lora_name": "x"})) == (400, "lora_path")
    assert error(http.post("/v1/load_lora_adapter", json={"lora_path": "x"})) == (400, "lora_name")
    assert error(unload(http, lora_name="nobody")) == (404, "lora_name")
    assert error(http.get("/v1/adapters/nobody")) == (404, "name")
    assert error(http.patch("/v1/adapters/nobody", json={"pinned": True})) == (404, "name")
    assert error(http.delete("/v1/adapters/nobody")) == (404, "name")
    assert unload(http, lora_name="nobody").json()["error"]["message"] == "The adapter `nobody` does not exist."
    assert error(unload(http)) == (400, "lora_name")
    assert error(unload(http, lora_name="")) == (400, "lora_name")
    assert names(http) == before


def test_many_loads_of_one_name_at_once_have_one_winner(http: httpx.Client, adapter_folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: load(http, "mine", adapter_folder), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] + [400] * 15
    assert names(http).count("mine") == 1


def test_a_dry_run_reports_and_keeps_nothing(http: httpx.Client, adapter_folder: Path) -> None:
    before = names(http)
    good = http.post("/v1/adapters", data={"dry_run": "true"}, files={"file": ("a.zip", zipped(adapter_folder))})
    assert good.status_code == 200, good.text
    assert (good.json()["is_ok"], good.json()["dry_run"], good.json()["report"]["rank"]) == (True, True, 4)
    probe = good.json()["probe"]
    assert (probe["verdict"], probe["mean_kl"] > 0.01, probe["num_tokens"]) == ("effect", True, 16)
    bad = http.post("/v1/adapters", data={"dry_run": "true"}, files={"file": ("a.zip", b"PK\x03\x04 no zip")})
    assert (bad.status_code, bad.json()["is_ok"]) == (200, False)
    assert bad.json()["errors"]
    assert names(http) == before


@pytest.mark.parametrize("is_zip", [True, False])
def test_an_upload_is_stored_listed_used_pinned_and_deleted(
    http: httpx.Client, client: openai.OpenAI, adapter_folder: Path, is_zip: bool
) -> None:
    loose = [("files", (path.name, path.read_bytes())) for path in adapter_folder.iterdir()]
    files: list[Any] = [("files", ("my lora (1).zip", zipped(adapter_folder)))] if is_zip else loose
    answer = http.post("/v1/adapters", data={"name": "up"}, files=files)
    assert answer.status_code == 200, answer.text
    assert answer.json()["adapter"]["name"] == "up" and answer.json()["is_ok"] is True
    assert answer.json()["probe"]["verdict"] == "effect"
    assert client.chat.completions.create(model="up", messages=HI, max_tokens=1).to_dict()["lora"]["name"] == "up"  # type: ignore[index]
    shown = http.get("/v1/adapters/up").json()
    assert (shown["is_stored"], shown["pinned"], shown["num_requests"]) == (True, False, 1)
    assert [version["is_current"] for version in shown["versions"]] == [True]
    assert "up" in {adapter["id"] for adapter in http.get("/v1/adapters").json()["data"]}
    assert http.patch("/v1/adapters/up", json={"pinned": True}).json()["pinned"] is True
    assert http.patch("/v1/adapters/up", json={"pinned": False}).json()["pinned"] is False
    assert error(http.post("/v1/adapters", data={"name": "up"}, files=files)) == (400, "name")
    assert http.delete("/v1/adapters/up").json() == {"id": "up", "object": "adapter", "deleted": True}
    assert error(http.get("/v1/adapters/up"))[0] == 404
    assert error(http.delete("/v1/adapters/up"))[0] == 404


def test_an_upload_goes_back_to_an_earlier_version(http: httpx.Client, speech_adapters: dict[str, Path]) -> None:
    def upload(which: str) -> str:
        data = {"name": "up", "load_inplace": "true"}
        answer = http.post("/v1/adapters", data=data, files={"file": ("a.zip", zipped(speech_adapters[which]))})
        generation: str = answer.json()["adapter"]["generation"]
        return generation

    first, second = upload("style"), upload("tower")
    assert first != second
    assert http.patch("/v1/adapters/up", json={"generation": first}).json()["generation"] == first
    assert http.patch("/v1/adapters/up", json={"generation": "sha256:none"}).status_code == 404


def test_a_path_goes_back_to_an_earlier_version_while_its_files_hold_it(
    http: httpx.Client, client: openai.OpenAI, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    def text(model: str) -> str | None:
        answer = client.chat.completions.create(model=model, messages=HI, temperature=0, max_tokens=12)
        return answer.choices[0].message.content

    folder = tmp_path / "mine"
    shutil.copytree(speech_adapters["style"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3 * config["lora_alpha"]}))
    assert load(http, "mine", folder).status_code == 200
    first_text = text("mine")
    first = http.get("/v1/adapters/mine").json()["generation"]
    assert load(http, "mine", speech_adapters["tower"], load_inplace=True).status_code == 200
    versions = http.get("/v1/adapters/mine").json()["versions"]
    assert [(version["is_current"], version["is_stored"]) for version in versions] == [(True, False), (False, False)]
    assert versions[1]["generation"] == first and text("mine") == text("tower")
    assert http.patch("/v1/adapters/mine", json={"generation": first}).json()["generation"] == first
    assert text("mine") == first_text != text("tower")
    second = versions[0]["generation"]
    assert http.patch("/v1/adapters/mine", json={"generation": second}).status_code == 200
    (folder / "adapter_config.json").write_text("{}")
    assert error(http.patch("/v1/adapters/mine", json={"generation": first}))[0] == 400
    shutil.rmtree(folder)
    assert error(http.patch("/v1/adapters/mine", json={"generation": first}))[0] == 404
    assert http.get("/v1/adapters/mine").json()["generation"] == second and text("mine") == text("tower")


def test_defaults_change_while_the_server_runs_and_are_pinned(
    http: httpx.Client, client: openai.OpenAI, base_model: str, audio_message: dict[str, Any]
) -> None:
    def who() -> tuple[str | None, str]:
        answer = client.chat.completions.create(model=base_model, messages=[audio_message], max_tokens=1)  # type: ignore[list-item]
        receipt: Any = answer.to_dict()["lora"]
        return receipt["name"], receipt["reason"]

    def patch(name: str, **fields: Any) -> httpx.Response:
        return http.patch(f"/v1/adapters/{name}", json=fields)

    assert who() == ("speech", "default:audio")
    try:
        changed = patch("style", default_for=["audio"]).json()
        assert (changed["default_for"], changed["pinned"]) == (["audio"], True)
        assert who() == ("style", "default:audio")
        before = http.get("/v1/adapters/speech").json()
        assert (before["default_for"], before["pinned"]) == ([], False)
        assert error(patch("style", pinned=False)) == (400, "pinned")
        assert patch("style", default_for=[], pinned=False).json()["pinned"] is False
        assert who() == (None, "base")
        assert error(patch("style", default_for=["smell"])) == (400, "default_for")
        assert error(patch("style", default_for="audio")) == (400, "default_for")
        assert error(patch("nobody", default_for=["audio"]))[0] == 404
        assert error(patch("nobody", default_for=[]))[0] == 404
        assert who() == (None, "base")
    finally:
        assert patch("speech", default_for=["audio"]).status_code == 200


def test_the_list_shows_what_adapters_take(http: httpx.Client, client: openai.OpenAI, adapter_folder: Path) -> None:
    assert load(http, "mine", adapter_folder).status_code == 200
    prompt = [{"role": "user", "content": "the same beginning of a prompt, twice over"}]
    for _ in range(2):
        client.chat.completions.create(model="mine", messages=prompt, max_tokens=1)  # type: ignore[arg-type]
    listed = http.get("/v1/adapters").json()
    mine = next(adapter for adapter in listed["data"] if adapter["id"] == "mine")
    num_tokens = mine["prefix_query_tokens"] // 2
    assert mine["prefix_hit_tokens"] == (num_tokens - 1) // 16 * 16 > 0
    assert (mine["num_requests"], mine["num_loads"]) == (2, 1) and mine["load_ms"] > 0
    stats = listed["stats"]
    assert stats["num_adapters"] == len(listed["data"]) and stats["cpu"]["count"] >= 2
    assert stats["cpu"]["bytes"] == sum(
        {a["generation"]: a["bytes"] for a in listed["data"] if a["state"] != "disk"}.values()
    )
    assert (stats["cpu"]["max_count"], stats["cpu"]["max_bytes"], stats["rows"]["max_count"]) == (64, None, 4)
    assert 0 < stats["rows"]["count"] <= 4 and stats["rows"]["loads"] > 0 and stats["loads"]["path"] > 0
    again = load(http, "mine", adapter_folder, load_inplace=True)
    assert again.status_code == 200 and http.get("/v1/adapters/mine").json()["num_loads"] == 2


def test_upload_and_patch_faults_name_the_field(http: httpx.Client, adapter_folder: Path) -> None:
    archive = zipped(adapter_folder)

    def upload(data: dict[str, str], files: Any) -> tuple[int, str | None]:
        return error(http.post("/v1/adapters", data=data, files=files))

    assert upload({"name": "up"}, {"wibble": ("a.zip", archive)}) == (400, "wibble")
    assert upload({"name": "up", "wibble": "1"}, {"file": ("a.zip", archive)}) == (400, "wibble")
    assert upload({}, {"file": ("a.zip", archive)}) == (400, "name")
    assert upload({"name": "none"}, {"file": ("a.zip", archive)}) == (400, "name")
    assert upload({"name": "up", "dry_run": "maybe"}, {"file": ("a.zip", archive)}) == (400, "dry_run")
    assert error(http.post("/v1/adapters", data={"name": "up"})) == (400, "files")
    assert upload({"name": "up"}, [("file", ("a", b"1")), ("file", ("a", b"2"))]) == (400, "files")
    assert upload({"name": "up"}, {"file": ("a.zip", b"no adapter")})[0] == 400
    assert error(http.patch("/v1/adapters/style", json={})) == (400, "pinned")
    assert error(http.patch("/v1/adapters/style", json={"pinned": 1})) == (400, "pinned")
    assert error(http.patch("/v1/adapters/nobody", json={"pinned": True}))[0] == 404


def test_updating_can_be_switched_off(serve_with: Serve, adapter_folder: Path) -> None:
    with serve_with(allow_runtime_lora_updating=False) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert error(load(http, "x", adapter_folder))[0] == 403
        assert error(unload(http, lora_name="style"))[0] == 403
        assert error(http.patch("/v1/adapters/style", json={"pinned": True}))[0] == 403
        assert error(http.delete("/v1/adapters/style"))[0] == 403
        files = {"file": ("a.zip", zipped(adapter_folder))}
        assert error(http.post("/v1/adapters", data={"name": "x"}, files=files))[0] == 403
        assert http.post("/v1/adapters", data={"dry_run": "1"}, files=files).json()["is_ok"] is True
        assert "style" in names(http)


def test_an_adapter_goes_out_as_a_zip_that_comes_in_again(http: httpx.Client, adapter_folder: Path) -> None:
    assert http.get("/v1/adapters/nobody/download").status_code == 404
    uploaded = http.post("/v1/adapters", data={"name": "out"}, files={"files": ("a.zip", zipped(adapter_folder))})
    assert uploaded.is_success
    answer = http.get("/v1/adapters/out/download")
    assert answer.headers["content-disposition"].endswith('filename="out.zip"')
    again = http.post("/v1/adapters", data={"name": "again"}, files={"files": ("b.zip", answer.content)})
    assert again.json()["adapter"]["generation"] == uploaded.json()["adapter"]["generation"]
