"""Keys of a tenants file: each sees and reaches its own adapters alone, within its share, and changes are recorded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.auth import Policy
from api.quota import Quota, RateLimited
from api.settings import ConfigFault, ServerSettings
from api.tenants import Caller, Role, TenantsFile
from engine import Engine
from tests.api.conftest import Serve


def tenant(name: str, key: str, **fields: object) -> dict[str, object]:
    return {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def write(path: Path, *tenants: object) -> Path:
    path.write_text(json.dumps({"tenants": tenants}))
    return path


def login(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_sees_and_reaches_its_adapters_alone_and_hears_of_no_others(
    serve_with: Serve, base_model: str, audio_message: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "t.json", tenant("ana", "a-key", adapters=["st*"]), tenant("root", "r-key", role="admin"))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    audio = {**chat, "messages": [audio_message], "model": base_model}
    with serve_with(tenants=str(path)) as url, httpx.Client(base_url=url, headers=login("a-key"), timeout=60) as http:

        def ids(path: str) -> set[str]:
            return {card["id"] for card in http.get(path).json()["data"]}

        assert ids("/v1/models") == {base_model, "style"}
        assert ids("/v1/adapters") == {"style"}
        assert http.get("/v1/adapters").json().keys() == {"object", "data"}
        assert http.post("/v1/chat/completions", json={**chat, "model": "style"}).status_code == 200
        assert http.post("/tokenize", json={"model": "style", "prompt": "a"}).status_code == 200
        # What is hidden is answered word for word like what does not exist.
        for method, route, body in (
            ("GET", "/v1/models/{}", None),
            ("GET", "/v1/adapters/{}", None),
            ("POST", "/v1/chat/completions", {**chat, "model": "{}"}),
            ("POST", "/v1/chat/completions", {**chat, "model": base_model, "lora": "{}"}),
            ("POST", "/v1/completions", {"model": "{}", "prompt": "a"}),
            ("POST", "/tokenize", {"model": "{}", "prompt": "a"}),
            ("POST", "/detokenize", {"model": "{}", "tokens": [1]}),
        ):
            answers = []
            for name in ("tower", "ghost"):
                sent = None if body is None else json.loads(json.dumps(body).replace("{}", name))
                answer = http.request(method, route.replace("{}", name), json=sent)
                answers.append((answer.status_code, answer.text.replace(name, "NAME")))
            assert answers[0] == answers[1], route
            assert answers[0][0] == 404
        # The default for audio is hidden too: an error, not the base model's answer, and without its name.
        refused = http.post("/v1/chat/completions", json=audio)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "lora")
        assert "speech" not in refused.text
        for lora in ("none", "style"):
            assert http.post("/v1/chat/completions", json={**audio, "lora": lora}).status_code == 200
        assert http.get("/metrics").status_code == 403
        assert http.delete("/v1/adapters/style").status_code == 403
        http.headers = httpx.Headers(login("r-key"))
        assert ids("/v1/models") == {base_model, "style", "speech", "tower"}
        assert http.post("/v1/chat/completions", json=audio).json()["lora"]["name"] == "speech"
        assert http.get("/metrics").status_code == 200


def test_a_share_that_is_used_up_is_429_until_it_has_filled(serve_with: Serve, base_model: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.json",
        tenant("few", "f", requests_per_minute=2),
        tenant("short", "s", tokens_per_minute=3),
    )
    body = {"model": base_model, "prompt": "a b c d e", "max_tokens": 2, "n": 2}
    with serve_with(tenants=str(path)) as url, httpx.Client(base_url=url, timeout=60) as http:
        for key, num_taken in (("f", 2), ("s", 1)):
            for _ in range(num_taken):
                assert http.post("/v1/completions", json=body, headers=login(key)).status_code == 200
            refused = http.post("/v1/completions", json=body, headers=login(key))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 300
            assert http.get("/v1/models", headers=login(key)).status_code == 200


def test_a_quota_fills_evenly_and_waits_for_what_was_overdrawn() -> None:
    clock = Clock()
    quota = Quota(requests_per_minute=60, tokens_per_minute=600, clock=clock)
    quota.admit()
    quota.spend(1000)
    with pytest.raises(RateLimited) as caught:
        quota.admit()
    assert caught.value.retry_after == 41  # 401 tokens at 10 a second
    clock.now += 41
    for _ in range(60):
        quota.admit()
    with pytest.raises(RateLimited, match="60 requests"):
        quota.admit()
    clock.now += 1
    quota.admit()


def test_the_file_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    path = write(tmp_path / "t.json", tenant("ana", "one", tokens_per_minute=5), tenant("bob", "two"))
    tenants = TenantsFile(path, clock)
    ana = tenants.find("one")
    assert ana is not None
    write(path, tenant("ana", "three", tokens_per_minute=5, adapters=[]))
    assert tenants.find("one") is ana  # not looked at again so soon
    clock.now += 2
    assert tenants.find("one") is None and tenants.find("two") is None
    renewed = tenants.find("three")
    assert renewed is not None and renewed.quota is ana.quota and not renewed.may_use("sql")
    for broken in ("{", '{"tenants": [{"name": "x"}]}'):
        path.write_text(broken)
        clock.now += 2
        assert tenants.find("three") is renewed
    path.unlink()
    clock.now += 2
    assert tenants.find("three") is renewed


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (5, "object"),
        ({"key_sha256": "0" * 64}, "no name"),
        ({"name": "a", "key_sha256": "secret"}, "key_sha256"),
        (tenant("a", "k", role="king"), "role"),
        (tenant("a", "k", adapters="sql"), "adapters"),
        (tenant("a", "k", adapters=["sql"], role="admin"), "administrator"),
        (tenant("a", "k", tokens_per_minute=0), "whole numbers"),
        (tenant("a", "k", requests_per_minute=True), "whole numbers"),
        (tenant("a", "k", adaptors=[]), "unknown field 'adaptors'"),
        (tenant("first", "other"), "another tenant"),
        (tenant("other", "first-key"), "another tenant"),
    ],
)
def test_a_wrong_file_ends_the_start_with_the_field_at_fault(tmp_path: Path, item: object, named: str) -> None:
    path = write(tmp_path / "t.json", tenant("first", "first-key"), item)
    with pytest.raises(ConfigFault, match=named):
        Policy(ServerSettings(tenants=str(path)))
    with pytest.raises(ConfigFault, match="cannot be read"):
        TenantsFile(tmp_path / "missing.json")


def test_a_tenants_key_works_beside_the_flags_and_as_a_password(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", tenant("ana", "a-key"))
    policy = Policy(ServerSettings(tenants=str(path), admin_key="root").resolve())
    assert policy.caller_of("Bearer a-key") == Caller("ana", Role.USER)
    assert policy.caller_of("Basic YW5hOmEta2V5").name == "ana"
    assert policy.role_of("Bearer root") is Role.ADMIN
    assert policy.role_of("Bearer nobody") is Role.NOBODY


def test_changes_of_adapters_are_recorded_with_who_and_how_they_ended(
    serve_with: Serve, adapter_folder: Path, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    with serve_with(admin_key="r-key", audit_log=str(audit)) as url, httpx.Client(base_url=url, timeout=60) as http:
        http.headers = httpx.Headers(login("r-key"))
        load = {"lora_name": "mine", "lora_path": str(adapter_folder)}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 400
        assert http.patch("/v1/adapters/mine", json={"pinned": True}).status_code == 200
        assert http.delete("/v1/adapters/mine").status_code == 200
        assert http.delete("/v1/adapters/mine").status_code == 404
    rows = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(row["action"], row["outcome"] == "ok") for row in rows] == [
        ("load", True), ("load", False), ("pin", True), ("delete", True), ("delete", False),
    ]  # fmt: skip
    assert {(row["by"], row["adapter"]) for row in rows} == {("admin-key", "mine")}
    assert "r-key" not in audit.read_text().replace("admin-key", "")


def test_a_name_that_is_hidden_from_a_key_is_looked_for_nowhere(
    tiny_engine: Engine, serve_with: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str | None] = []

    async def note(*names: str | None) -> None:
        looked_for.extend(names)

    monkeypatch.setattr(tiny_engine, "find_adapters", note)
    path = write(tmp_path / "t.json", tenant("ana", "a-key", adapters=["team-*"]))
    with serve_with(tenants=str(path)) as url, httpx.Client(base_url=url, headers=login("a-key"), timeout=60) as http:
        for name in ("team-a", "secret"):
            for route, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "a"}),
                ("/tokenize", {"prompt": "a"}),
                ("/detokenize", {"tokens": [1]}),
            ):
                assert http.post(route, json={"model": name, **body}).status_code == 404, route
    assert set(looked_for) - {None} == {"team-a"}


# What the openai package for JavaScript sends beside the usual headers.
_SDK_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,x-stainless-timeout"
)


def test_other_sites_pages_may_call_only_where_they_are_named(serve_with: Serve) -> None:
    asks = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": _SDK_HEADERS,
    }
    for settings, allowed in (({}, None), ({"allowed_origins": ["https://app.example"]}, "https://app.example")):
        with serve_with(api_key="k", **settings) as url, httpx.Client(base_url=url, timeout=60) as http:
            asked = http.options("/v1/chat/completions", headers=asks)
            assert asked.headers.get("access-control-allow-origin") == allowed
            assert (asked.status_code == 200) is (allowed is not None)
            assert all(
                name in asked.headers.get("access-control-allow-headers", "") for name in _SDK_HEADERS.split(",")
            ) is (allowed is not None)
            for method in ("GET", "HEAD", "PATCH", "DELETE"):
                asked = http.options("/v1/models", headers={**asks, "access-control-request-method": method})
                assert (asked.status_code == 200) is (allowed is not None), method
            other = http.get("/v1/models", headers={**login("k"), "origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4"])
def test_an_open_server_on_a_network_must_be_asked_for(host: str) -> None:
    with pytest.raises(ConfigFault, match="--insecure"):
        ServerSettings(host=host).resolve()
    for settings in ({"insecure": True}, {"api_key": "k"}, {"auth": "a:b"}, {"tenants": "t.json"}):
        ServerSettings(host=host, **settings).resolve()  # type: ignore[arg-type]
    assert ServerSettings().resolve().allowed_origins == []
