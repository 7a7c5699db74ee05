"""Error rates of the held-out sets within training: greedy answers in batches, on the device.

A quick look, not the model card's figures: clips lie in the middle of a bucket's silence, in bfloat16. Called by `train`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from .evaluate import PROMPT, word_errors
from .features import BUCKETS, FeatureMaker, num_samples
from .network import Network

HELD_OUT_FILE = "held-out.npz"
BATCH = 64


class HeldOutCheck:
    """Clips of `held_out.write_clips`, and the network that is to hear them."""

    def __init__(self, network: Network, features: FeatureMaker, tokenizer: Tokenizer, file: Path) -> None:
        self._network, self._features, self._tokenizer, self._file = network, features, tokenizer, file
        before, after = "<|start_of_role|>user<|end_of_role|>", f"{PROMPT}<|end_of_text|>\n"
        after += "<|start_of_role|>assistant<|end_of_role|>"
        self._prompt = (
            tokenizer.encode(before, add_special_tokens=False).ids,
            tokenizer.encode(after, add_special_tokens=False).ids,
        )

    def word_error_rates(self) -> dict[str, float]:
        """Of each set; empty where the clips are not there."""
        if not self._file.exists():
            return {}
        with np.load(self._file) as file:
            sets, texts = file["sets"].tolist(), file["texts"].tolist()
            clips = np.split(file["samples"], np.cumsum(file["lens"])[:-1])
        by_bucket: dict[int, list[int]] = defaultdict(list)
        for index, clip in enumerate(clips):
            bucket = next((bucket for bucket in BUCKETS if num_samples(bucket) >= clip.size), None)
            if bucket is not None:
                by_bucket[bucket].append(index)
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for bucket, indices in by_bucket.items():
            for start in range(0, len(indices), BATCH):
                chosen = indices[start : start + BATCH]
                for index, heard in zip(chosen, self._hear(bucket, [clips[i] for i in chosen]), strict=True):
                    edits, words = word_errors(texts[index], heard)
                    counts[sets[index]][0] += edits
                    counts[sets[index]][1] += words
        return {name: round(edits / words, 4) for name, (edits, words) in sorted(counts.items())}

    @torch.no_grad()
    def _hear(self, bucket: int, clips: list[np.ndarray]) -> list[str]:
        rows = np.zeros((len(clips), num_samples(bucket)), np.float32)
        for row, clip in zip(rows, clips, strict=True):
            start = (row.size - clip.size) // 2
            row[start : start + clip.size] = clip.astype(np.float32) / 32768
        wave = torch.from_numpy(rows).to(self._network.device)
        features = self._features.log_mel(wave, bucket, augment=False)
        return [self._tokenizer.decode(ids).strip() for ids in self._network.transcripts(features, self._prompt)]
