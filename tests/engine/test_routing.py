"""The routing rule, row by row."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest, ModelNotFound
from engine.routing import Route, choose_route

DEFAULTS = {"audio": "speech", "image": "vision"}
BASES = ("base", "base-alias")
ADAPTERS = {"speech", "vision", "sql"}


def route(model: str | None, lora: str | None, modalities: set[str], defaults: dict[str, str] = DEFAULTS) -> Route:
    return choose_route(
        model=model, lora=lora, modalities=modalities, base_names=BASES, defaults=defaults,
        is_adapter=ADAPTERS.__contains__,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "lora", "modalities", "expected"),
    [
        ("sql", None, set(), Route("sql", "explicit")),
        ("sql", "auto", {"audio"}, Route("sql", "explicit")),
        ("base", "sql", {"audio", "image"}, Route("sql", "explicit")),
        ("sql", "sql", set(), Route("sql", "explicit")),
        (None, "sql", set(), Route("sql", "explicit")),
        ("base", None, set(), Route(None, "base")),
        ("base-alias", "auto", {"video"}, Route(None, "base")),
        (None, None, {"audio"}, Route("speech", "default:audio")),
        ("base", None, {"image"}, Route("vision", "default:image")),
        ("base", None, {"audio", "image"}, Route(None, "conflict:audio=speech,image=vision")),
        ("base", "none", {"audio"}, Route(None, "opt-out")),
        ("base", "base", {"audio"}, Route(None, "opt-out")),
    ],
)
def test_each_row_of_the_rule(model: str | None, lora: str | None, modalities: set[str], expected: Route) -> None:
    assert route(model, lora, modalities) == expected


def test_two_modalities_with_the_same_default_use_it() -> None:
    same = {"audio": "speech", "image": "speech"}
    assert route("base", None, {"image", "audio"}, same) == Route("speech", "default:audio+image")


def test_a_modality_without_default_does_not_conflict() -> None:
    assert route("base", None, {"audio", "image"}, {"audio": "speech"}) == Route("speech", "default:audio")


@pytest.mark.parametrize(
    ("model", "lora", "param"), [("nope", None, "model"), ("base", "nope", "lora"), ("nope", "none", "model")]
)
def test_unknown_names_are_not_served_by_the_base(model: str, lora: str | None, param: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        route(model, lora, set())
    assert caught.value.param == param and caught.value.status == 404


def test_two_different_adapters_for_one_prompt_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one prompt takes one adapter"):
        route("sql", "vision", set())
