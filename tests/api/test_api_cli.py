"""The command line: adapters to load, old flags, contradictions, and words against the environment."""

from __future__ import annotations

import argparse

import pytest

from api.cli import parse_command_line, parse_lora_modules
from api.settings import ConfigFault
from engine.config import EMBEDDED_MODEL, LoRAModule

SQL, PIRATE = LoRAModule("sql", "/a/sql"), LoRAModule("pirate", "org/pirate", "tiny")
PIRATE_JSON = '{"name": "pirate", "path": "org/pirate", "base_model_name": "tiny"}'


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("sql=/a/sql", [SQL]),
        ("sql=/a=b=c", [LoRAModule("sql", "/a=b=c")]),
        ("sql=/a,b", [LoRAModule("sql", "/a,b")]),
        ("sql=s3://bucket/key?x=1", [LoRAModule("sql", "s3://bucket/key?x=1")]),
        (PIRATE_JSON, [PIRATE]),
        (f'[{PIRATE_JSON}, {{"name": "sql", "path": "/a/sql", "base_model_name": null}}]', [PIRATE, SQL]),
        ("", []),
        ("[]", []),
    ],
)
def test_an_item_of_lora_modules_is_a_pair_an_object_or_a_list(text: str, modules: list[LoRAModule]) -> None:
    assert parse_lora_modules(text) == modules


@pytest.mark.parametrize(
    "text",
    [
        "sql",
        "=path",
        "name=",
        "{bad json",
        '{"name": "sql"}',
        '{"name": "sql", "path": "/a", "rank": 8}',
        '{"name": 3, "path": "/a"}',
        '{"name": "sql", "path": ""}',
        '["sql=/a"]',
    ],
)
def test_a_wrong_item_of_lora_modules_is_shown_with_what_to_write(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as fault:
        parse_lora_modules(text)
    assert text[:6].strip('[{"') in str(fault.value)


def test_the_model_may_be_the_first_word_or_a_flag() -> None:
    assert parse_command_line([], {}).engine.model == str(EMBEDDED_MODEL)
    assert parse_command_line(["org/model", "--port", "1"], {}).engine.model == "org/model"
    assert parse_command_line(["--model", "org/model"], {}).engine.model == "org/model"
    with pytest.raises(ConfigFault, match="twice"):
        parse_command_line(["a", "--model", "b"], {})


def test_lora_modules_take_several_items_and_may_be_repeated() -> None:
    words = ["--lora-modules", "sql=/a/sql", PIRATE_JSON, "--lora-modules", "c=/c"]
    assert parse_command_line(words, {}).engine.lora_modules == [SQL, PIRATE, LoRAModule("c", "/c")]
    in_environment = {"SWITCHBOARD_LORA_MODULES": f"[{PIRATE_JSON}]"}
    assert parse_command_line([], in_environment).engine.lora_modules == [PIRATE]


def test_resolvers_keep_their_order_and_the_known_variables_stand_for_items_of_the_flag() -> None:
    environ = {"VLLM_LORA_RESOLVER_HF_REPO_LIST": "a/b,c/d", "VLLM_LORA_RESOLVER_CACHE_DIR": "/loras"}
    assert parse_command_line([], environ).engine.lora_resolver == ["local:/loras", "hub:a/b,c/d"]
    words = ["--lora-resolver", "s3://bucket/x", "local:/y"]
    assert parse_command_line(words, environ).engine.lora_resolver == ["s3://bucket/x", "local:/y"]
    own = environ | {"SWITCHBOARD_LORA_RESOLVER": "local:/z m:C"}
    assert parse_command_line([], own).engine.lora_resolver == ["local:/z", "m:C"]


def test_words_win_over_the_environment() -> None:
    environ = {"SWITCHBOARD_PORT": "7001", "SWITCHBOARD_MAX_LORAS": "2", "SWITCHBOARD_API_KEY": "k"}
    command = parse_command_line(["--port", "7002"], environ)
    assert (command.server.port, command.engine.max_loras, command.server.api_key) == (7002, 2, "k")


def test_dotted_keys_are_joined_to_the_object_that_a_flag_takes() -> None:
    words = ["--default-mm-loras.audio", "speech", "--default-mm-loras.image=see", "--limit-mm-per-prompt.audio", "2"]
    config = parse_command_line(words, {}).engine
    assert config.default_mm_loras == {"audio": "speech", "image": "see"}
    assert config.limit_mm_per_prompt == {"audio": 2}


def test_switches_have_a_negative() -> None:
    assert parse_command_line(["--no-enable-lora"], {}).engine.enable_lora is False
    assert parse_command_line(["--no-allow-runtime-lora-updating"], {}).server.allow_runtime_lora_updating is False
    assert parse_command_line([], {}).server.allow_runtime_lora_updating is True


def test_old_flags_without_effect_are_accepted_with_a_warning() -> None:
    words = ["--long-lora-scaling-factors", "4.0", "--enable-tower-connector-lora"]
    command = parse_command_line(words, {})
    assert ["no effect" in warning for warning in command.warnings] == [True]
    assert parse_command_line([], {}).warnings == ()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-lora", "3"], "did you mean --max-loras?"),
        (["--pipeline-parallel-size", "2"], "unknown flag --pipeline-parallel-size"),
        (["--port", "many"], "--port"),
        (["--port"], "--port"),
        (["--lora-modules", "sql"], "NAME=PATH"),
        (["--default-mm-loras", "speech"], "not JSON"),
        (["--default-mm-loras", '{"audio": 3}'], "--default-mm-loras"),
        (["--default-mm-loras.audio"], "expected one argument"),
        (["--limit-mm-per-prompt", '{"audio": "x"}'], "--limit-mm-per-prompt"),
        (["--lora-extra-vocab-size", "-1"], "--lora-extra-vocab-size"),
        (["--no-enable-tower-connector-lora"], "--no-enable-tower-connector-lora"),
        (["--lora-resolvers", "local:/a"], "unknown flag --lora-resolvers; did you mean --lora-resolver?"),
        (["--lora-resolver", "local:"], "--lora-resolver local:: not understood; write local:DIR"),
        (["--no-enable-lora", "--lora-resolver", "local:/a"], "--no-enable-lora contradicts --lora-resolver"),
        (["--no-enable-lora", "--lora-modules", "a=/a"], "contradicts"),
        (["--no-enable-lora", "--default-mm-loras", '{"audio": "a"}'], "contradicts"),
        (["--lora-modules", "a=/a", "a=/b"], "twice"),
        (["--lora-modules", "a=/a", "--served-model-name", "a"], "both"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--dtype", "float8"], "--dtype"),
        (["--load-format", "pickle"], "--load-format"),
        (["--host", "0.0.0.0", "--allow-runtime-lora-updating"], "--admin-key"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_that_names_the_flag(words: list[str], named: str) -> None:
    with pytest.raises(ConfigFault) as fault:
        parse_command_line(words, {})
    assert named in fault.value.message
    assert "\n" not in fault.value.message
