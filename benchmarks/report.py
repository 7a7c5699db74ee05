"""What every benchmark prints last: one JSON object with its set-up, versions and figures."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any, NoReturn

import torch
import transformers


def versions() -> dict[str, Any]:
    """What the figures depend on beside the code: libraries, device and threads."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def finish(setup: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print the result line."""
    print(json.dumps({"setup": setup, "versions": versions(), "figures": figures}))


def refuse(reason: str) -> NoReturn:
    """End without figures: a benchmark whose answers are wrong measures nothing."""
    print(json.dumps({"error": reason, "versions": versions()}))
    sys.exit(1)
