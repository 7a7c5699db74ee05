"""Gathers what training needs beside this repository, PyTorch and transformers, for a machine without a network.

    python -m assets.training.prepare DIR

`DIR/tokenizer` is a tokenizer learned anew; `DIR/site` the Python package `espeakng_loader` with English alone; `DIR/lib`
flite's libraries. On the other machine (x86-64 Linux) DIR/site goes into PYTHONPATH and DIR/lib into LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
from pathlib import Path

from .tokenizer import train_tokenizer

FLITE_VOICES = ("slt", "awb", "kal", "kal16", "rms")
FLITE_LIBRARIES = ("flite", "flite_usenglish", "flite_cmulex", *(f"flite_cmu_us_{voice}" for voice in FLITE_VOICES))
ESPEAK_DATA = ("en_dict", "intonations", "phondata", "phondata-manifest", "phonindex", "phontab", "lang/gmw", "voices")


def copy_espeak(folder: Path) -> None:
    """The package `espeakng_loader` with the data of English."""
    package = Path(importlib.import_module("espeakng_loader").__file__ or "").parent
    target = folder / package.name
    target.mkdir(parents=True, exist_ok=True)
    for path in package.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    for name in ESPEAK_DATA:
        source, copy = package / "espeak-ng-data" / name, target / "espeak-ng-data" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copy(source, copy)


def copy_flite(folder: Path) -> None:
    """flite's libraries and the sound library that they name, as the linker here finds them.

    Raises:
        FileNotFoundError: one of them is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    places = {parts[0]: parts[-1] for line in known.splitlines() if len(parts := line.split()) > 2}
    for name in (*(f"lib{library}.so.1" for library in FLITE_LIBRARIES), "libasound.so.2"):
        if name not in places:
            raise FileNotFoundError(f"{name} is not installed; on Debian: apt install flite")
        shutil.copyfile(places[name], folder / name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    copy_espeak(folder / "site")
    copy_flite(folder / "lib")
    train_tokenizer().save_pretrained(folder / "tokenizer")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
