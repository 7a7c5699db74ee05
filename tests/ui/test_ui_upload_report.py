"""Files that are dropped together become the right parcels, and a dry run reads as plain sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.card import AdapterCard, parse_card
from adapters.report import AdapterReport
from adapters.upload import ProbeReport, UploadReport
from ui.text import LANGUAGES, Texts
from ui.upload_report import Parcel, adapter_name, make_parcels, report_html, report_lines

TEXT = Texts()


def facts(**changes: Any) -> dict[str, Any]:
    report = AdapterReport(
        matched=14, total=14, rank=8, ranks={8: 14}, alpha=16.0, scale=2.0, scales={2.0: 14},
        target_modules=["q_proj", "v_proj"], parts=["decoder"], num_modules=14, num_bytes=40_960, dtype="float32",
        digest="sha256:00", base_model="tiny", warnings=[], is_zero_effect=False,
    )  # fmt: skip
    return report.to_dict() | changes


def parcel(report: UploadReport) -> Parcel:
    return Parcel("x.zip", {"x.zip": Path("x.zip")}, "x", report=report)


def test_each_zip_is_a_parcel_and_loose_files_are_one() -> None:
    names = ("a/one.zip", "b/adapter_config.json", "c/TWO.ZIP", "d/adapter_model.safetensors")
    parcels = make_parcels(TEXT, [Path(name) for name in names])
    assert [sorted(each.files) for each in parcels] == [
        ["one.zip"], ["TWO.ZIP"], ["adapter_config.json", "adapter_model.safetensors"],
    ]  # fmt: skip
    assert [each.problem for each in parcels] == [None] * 3


def test_two_loose_files_of_one_name_are_not_guessed_at() -> None:
    (only,) = make_parcels(TEXT, [Path("a/adapter_config.json"), Path("b/adapter_config.json")])
    assert only.problem is not None and "two files called adapter_config.json" in only.problem
    assert not only.is_ready


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("my lora (1)", "my-lora-1"),
        ("Spanish_v2.1", "Spanish_v2.1"),
        ("--x--", "x"),
        ("模型", "adapter"),
        ("", "adapter"),
    ],
)
def test_a_file_name_becomes_a_name_that_is_allowed(stem: str, name: str) -> None:
    assert adapter_name(stem) == name


def test_a_good_adapter_reads_as_what_was_checked() -> None:
    lines = report_lines(TEXT, parcel(UploadReport(True, files=["adapter_config.json"], report=facts())))
    assert {verdict for verdict, _ in lines} == {"passed"}
    said = "\n".join(words for _, words in lines)
    for expected in (
        "14 of 14 tensor pairs",
        "Rank 8, alpha 16, scale 2",
        "q_proj, v_proj",
        "41.0 kB",
        "Trained on tiny",
    ):
        assert expected in said


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", "Its card brings: a description, system prompt, temperature 0, max tokens 96, examples (2)"),
        ("zh-CN", "它的卡片带来：说明, 系统提示词, 温度 0, 最多词元数 96, 示例（2）"),
    ],
)
def test_what_an_adapters_card_brings_is_told(language: str, said: str) -> None:
    content = {
        "description": "Writes SQL.", "system_prompt": "One query.", "sampling": {"temperature": 0, "max_tokens": 96},
        "examples": ["How many?", "Which?"],
    }  # fmt: skip
    text = Texts(LANGUAGES[language])
    for card, expected in ((content, said), ({}, text("report.card.empty"))):
        brought = parse_card(json.dumps(card).encode()).to_dict()
        del brought["license"]  # As a report that was stored before there were licences.
        lines = report_lines(text, parcel(UploadReport(True, report=facts(card=brought))))
        assert [(verdict, words) for verdict, words in lines if words == expected] == [("passed", expected)]
    assert not [words for _, words in report_lines(text, parcel(UploadReport(True, report=facts()))) if "card" in words]
    licensed = facts(card=AdapterCard(license="apache-2.0").to_dict())
    words = report_lines(text, parcel(UploadReport(True, report=licensed)))[-1][1]
    assert words.endswith({"en": ": license apache-2.0", "zh-CN": "：许可证 apache-2.0"}[language])


def test_mixed_ranks_doubts_and_faults_are_told() -> None:
    mixed = facts(ranks={"8": 10, "16": 4}, scales={"2": 10, "1": 4}, warnings=["other base"], is_zero_effect=True)
    lines = report_lines(TEXT, parcel(UploadReport(True, ignored=["x/README.md", "optimizer.pt"], report=mixed)))
    warnings = [words for verdict, words in lines if verdict == "warning"]
    assert warnings == [TEXT("report.zero"), "Other base.", "Not used: x/README.md, optimizer.pt"]
    usual = report_lines(TEXT, parcel(UploadReport(True, ignored=["x/README.md", "LICENSE.txt"], report=facts())))
    assert ("passed", "Not used: x/README.md, LICENSE.txt") in usual
    assert any("8 (10×), 16 (4×)" in words for _, words in lines)
    refused = parcel(UploadReport(False, errors=["rank 512 is over the limit of 64; start with --max-lora-rank 512"]))
    assert report_lines(TEXT, refused) == [
        ("failed", "Rank 512 is over the limit of 64; start with --max-lora-rank 512.")
    ]
    assert not refused.is_ready


@pytest.mark.parametrize(
    ("probe", "verdict", "said"),
    [
        (ProbeReport(0.4257, 0.25, 16, "effect"), "passed", "in 25% of 16 places (mean KL 0.43)"),
        (ProbeReport(0.0042, 0.0625, 16, "slight effect"), "passed", "it changes little, 6% of 16"),
        (
            ProbeReport(0.0042, 0.0, 16, "slight effect"),
            "passed",
            "how likely words are, not which is likeliest (16 places",
        ),
        (ProbeReport(0.0, 0.0, 16, "no effect"), "warning", "no effect"),
        (ProbeReport(None, None, 3, "broken"), "warning", "its numbers are broken"),
        (ProbeReport(None, None, 0, "not measured"), "warning", "Its effect is unknown"),
    ],
)
def test_what_trying_an_adapter_out_showed_is_told(probe: ProbeReport, verdict: str, said: str) -> None:
    lines = report_lines(TEXT, parcel(UploadReport(True, report=facts(), probe=probe)))
    assert [each for each, words in lines if said in words] == [verdict]


def test_a_name_that_is_taken_is_said_before_anything_is_pressed() -> None:
    ready = parcel(UploadReport(True, report=facts()))
    for names, is_replacing, is_warned in ((["x"], False, True), (["x"], True, False), (["y"], False, False)):
        ready.replaces = is_replacing
        html = report_html(TEXT, [ready], names)
        assert (">Name taken</span>" in html, ">Ready to install</span>" in html) == (is_warned, not is_warned)
        assert ("The name x is taken." in html) == is_warned


def test_a_failed_installation_is_not_called_ready() -> None:
    tried = parcel(UploadReport(True, report=facts()))
    tried.problem = "The disk is full."
    html = report_html(TEXT, [tried])
    assert ">Not installed</span>" in html and "chip good" not in html and "The disk is full." in html


def test_nothing_in_an_upload_becomes_markup() -> None:
    nasty = Parcel("<b>x</b>.zip", {}, "<i>x</i>'", report=UploadReport(True, files=["<u>y</u>"], report=facts()))
    html = report_html(TEXT, [nasty], ["<s>'", nasty.name])
    assert not any(tag in html for tag in ("<b>x", "<i>x", "<u>y", "x</i>'", "<s>", "s>'"))
