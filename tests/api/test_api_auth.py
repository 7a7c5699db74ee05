"""One policy: once any credential is set, nothing but `/health` answers without one, and changes need the admin's."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import openai
import pytest

from api.auth import Policy, Role
from api.settings import ServerSettings
from tests.api.conftest import Serve

ROUTES = [
    ("GET", "/"),
    ("GET", "/nowhere"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/speech"),
    ("GET", "/v1/adapters"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/adapters"),
    ("PATCH", "/v1/adapters/speech"),
    ("DELETE", "/v1/adapters/speech"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/gradio_api/info"),
    ("GET", "/health/../v1/models"),
    ("GET", "//health"),
]
CHANGES = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/adapters"),
    ("PATCH", "/v1/adapters/nobody"),
    ("DELETE", "/v1/adapters/nobody"),
]


def bearer(key: str) -> str:
    return f"Bearer {key}"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("settings", [{"api_key": "k-3f"}, {"admin_key": "r-9d"}, {"auth": "ana:s-77"}])
def test_nothing_but_health_answers_without_a_credential(serve_with: Serve, settings: dict[str, str]) -> None:
    with serve_with(**settings) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        for method, path in ROUTES:
            for headers in ({}, {"authorization": bearer("wrong")}, {"authorization": basic("ana", "wrong")}):
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"].startswith("Basic ")
                assert all(secret not in answer.text for secret in settings.values())


@pytest.mark.parametrize(
    ("settings", "authorization", "role"),
    [
        ({}, None, Role.ADMIN),
        ({}, "Bearer EMPTY", Role.ADMIN),
        ({"api_key": "key"}, bearer("key"), Role.ADMIN),
        ({"api_key": "key"}, "bearer key", Role.ADMIN),
        ({"api_key": "key"}, basic("anyone", "key"), Role.ADMIN),
        ({"api_key": "key"}, bearer("key2"), Role.NOBODY),
        ({"api_key": "key"}, bearer(""), Role.NOBODY),
        ({"api_key": "key"}, "key", Role.NOBODY),
        ({"api_key": "key"}, "Basic !", Role.NOBODY),
        ({"api_key": "key", "admin_key": "root"}, bearer("key"), Role.USER),
        ({"api_key": "key", "admin_key": "root"}, bearer("root"), Role.ADMIN),
        ({"admin_key": "root"}, basic("", "root"), Role.ADMIN),
        ({"auth": "ana:se:cret"}, basic("ana", "se:cret"), Role.ADMIN),
        ({"auth": "ana:secret"}, basic("bob", "secret"), Role.NOBODY),
        ({"auth": "ana:secret"}, bearer("ana:secret"), Role.NOBODY),
        ({"auth": "ana:secret", "admin_key": "root"}, basic("ana", "secret"), Role.USER),
        ({"auth": "ana:secret", "admin_key": "root"}, basic("ana", "root"), Role.ADMIN),
        ({"api_key": "schl\u00fcssel"}, bearer("schl\u00fcssel"), Role.ADMIN),
    ],
)
def test_a_credential_has_one_role(settings: dict[str, str], authorization: str | None, role: Role) -> None:
    assert Policy(ServerSettings(**settings)).role_of(authorization) is role  # type: ignore[arg-type]


def test_the_openai_package_logs_in_with_its_key(serve_with: Serve) -> None:
    with serve_with(api_key="k-3f") as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k-3f") as client:
            assert len(client.models.list().data) > 1
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_under_a_root_path_health_alone_is_open_with_and_without_the_prefix(serve_with: Serve) -> None:
    with serve_with(api_key="k-3f", root_path="studio") as url, httpx.Client(base_url=url, timeout=60) as http:
        for prefix in ("", "/studio"):
            assert http.get(f"{prefix}/health").status_code == 200
            assert http.get(f"{prefix}/v1/models").status_code == 401
            assert http.get(f"{prefix}/v1/models", headers={"authorization": bearer("k-3f")}).status_code == 200


def test_changes_need_the_admin_key_where_there_is_one(serve_with: Serve) -> None:
    with serve_with(api_key="key", admin_key="root") as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/v1/models", headers={"authorization": bearer("key")}).status_code == 200
        for method, path in CHANGES:
            refused = http.request(method, path, headers={"authorization": bearer("key")}, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), (method, path)
            allowed = http.request(method, path, headers={"authorization": bearer("root")}, json={})
            assert allowed.status_code in (400, 404), (method, path)


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"origin": "null"}])
def test_a_page_of_another_site_cannot_change_adapters(
    http: httpx.Client, base_url: str, headers: dict[str, Any]
) -> None:
    for method, path in CHANGES:
        refused = http.request(method, path, headers=headers, json={})
        assert refused.status_code == 403, (method, path)
        own = http.request(method, path, headers={"origin": base_url}, json={})
        assert own.status_code in (400, 404)
    assert http.get("/v1/models", headers=headers).status_code == 200
