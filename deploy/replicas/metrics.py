"""The metrics of several replicas as one text for Prometheus: each sample says which replica it is of. Called by `ingress`."""

from __future__ import annotations

from collections.abc import Iterable


def merge_metrics(texts: Iterable[tuple[str, str]]) -> str:
    """One text in Prometheus' form from those of the replicas, given as `(replica, text)`.

    The samples of a metric must follow each other, so they are collected by metric first.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts:
        comments: list[str] = []
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split()[2], ([], []))
            if line.startswith("#"):
                if line not in comments:
                    comments.append(line)
            elif line:
                samples.append(_with_replica(line, replica))
    return "".join(f"{line}\n" for comments, samples in families.values() for line in comments + samples)


def _with_replica(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    label = f'replica="{replica}"'
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
