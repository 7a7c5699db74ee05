"""Settings: what is refused, what follows from what, and what the environment says."""

from __future__ import annotations

import pytest

from api.settings import ConfigFault, ServerSettings, environment_values, is_loopback_host
from engine.config import EngineConfig


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_hosts_may_update_adapters_by_default(host: str) -> None:
    assert is_loopback_host(host)
    assert ServerSettings(host=host).resolve().allow_runtime_lora_updating is True
    assert ServerSettings(host=host, allow_runtime_lora_updating=False).resolve().allow_runtime_lora_updating is False


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.4", "example.org"])
def test_other_hosts_need_an_admin_key_to_update_adapters(host: str) -> None:
    assert ServerSettings(host=host, insecure=True).resolve().allow_runtime_lora_updating is False
    with pytest.raises(ConfigFault, match="--admin-key"):
        ServerSettings(host=host, allow_runtime_lora_updating=True, api_key="k").resolve()
    settings = ServerSettings(host=host, allow_runtime_lora_updating=True, admin_key="a").resolve()
    assert settings.allow_runtime_lora_updating is True


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"port": 70000}, "--port"),
        ({"port": -1}, "--port"),
        ({"api_key": ""}, "--api-key"),
        ({"admin_key": ""}, "--admin-key"),
        ({"auth": "nobody"}, "--auth"),
        ({"auth": ":secret"}, "--auth"),
        ({"auth": "ana:"}, "--auth"),
        ({"api_key": "same", "admin_key": "same"}, "--admin-key"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"request_timeout": -1.0}, "--request-timeout"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
        ({"drain_seconds": -1.0}, "--drain-seconds"),
        ({"log_level": "loud"}, "--log-level"),
        ({"root_path": "/a b"}, "--root-path"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence_that_names_the_flag(values: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigFault) as fault:
        ServerSettings(**values).resolve()  # type: ignore[arg-type]
    assert flag in fault.value.message
    assert "\n" not in fault.value.message


def test_no_text_form_of_the_settings_holds_a_credential() -> None:
    settings = ServerSettings(api_key="key-one", admin_key="key-two", auth="ana:key-three")
    assert "key-" not in repr(settings) + str(settings)
    assert "host='127.0.0.1'" in repr(settings)


@pytest.mark.parametrize(("given", "clean"), [("", ""), ("/", ""), ("studio", "/studio"), ("/a/b/", "/a/b")])
def test_the_root_path_begins_with_a_slash_and_ends_without(given: str, clean: str) -> None:
    assert ServerSettings(root_path=given).resolve().root_path == clean


def test_the_environment_fills_rows_of_every_kind() -> None:
    environ = {
        "SWITCHBOARD_PORT": "7901",
        "SWITCHBOARD_API_KEY": "own",
        "VLLM_API_KEY": "other",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "False",
        "SWITCHBOARD_AUTH": "",
        "PORT": "1",
    }
    expected = {"port": 7901, "api_key": "own", "allow_runtime_lora_updating": False}
    assert environment_values(ServerSettings, environ) == expected
    engine = {
        "SWITCHBOARD_ENFORCE_EAGER": "1",
        "SWITCHBOARD_SERVED_MODEL_NAME": "a 'b c'",
        "SWITCHBOARD_MAX_LORAS": "3",
    }
    assert environment_values(EngineConfig, engine) == {
        "enforce_eager": True,
        "served_model_name": ["a", "b c"],
        "max_loras": 3,
    }


@pytest.mark.parametrize("variable", ["SWITCHBOARD_PORT", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"])
def test_a_wrong_variable_is_named(variable: str) -> None:
    with pytest.raises(ConfigFault, match=variable):
        environment_values(ServerSettings, {variable: "many"})
