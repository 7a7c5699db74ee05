"""The benchmark of quantised bases runs to its end, and refuses figures where answers are wrong."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import quantization

pytestmark = pytest.mark.filterwarnings("ignore")  # The packages' own business.


def test_int8_costs_little_and_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "benchmark --methods int8 --prompts 2 --prompt-len 8 --output-len 4"
    monkeypatch.setattr(sys, "argv", words.split())
    quantization.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    (row,) = figures["methods"].values()
    assert 0 < row["error"] < 0.03 and 0 < row["kl"] < 0.01
    assert 8 < row["bits"] < 9 and row["bytes"] < 0.5 * figures["full_bytes"]


def test_wrong_answers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    logits = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]])
    quantization.check([[7, 1, 0]], logits, "int8", prompt_len=1)
    with pytest.raises(SystemExit):
        quantization.check([[7, 1, 1]], logits, "int8", prompt_len=1)
    assert "the engine's tokens are not PEFT's" in capsys.readouterr().out
