"""The hash that names an adapter's content: one a piece, so that threads can share the work, and one over those.

It follows the stored bytes, types, shapes, layers and effective scales, and nothing else: not the files' layout, names or
number, nor the threads. Called by `weights`, also for the hash that earlier versions of this program computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from adapters.places import Place, bytes_of
from adapters.planned import AdapterPlan, PlannedPair

_FORMAT = b"switchboard adapter content 2\n"


def content_hash(plan: AdapterPlan, hashes: Iterable[bytes]) -> hashlib._Hash:
    """sha256 over what the plan says of each tensor, in its order, and over what `read_slab` returned."""
    headers = (_header(planned, place) for planned in plan.pairs.values() for place in (planned.a, planned.b))
    return hashlib.sha256(b"".join((_FORMAT, *headers, *hashes)))


def first_format_hash(plan: AdapterPlan) -> hashlib._Hash:
    """What the first format gave: one hash over everything, in order. Catalogues of that time hold it; reads the files."""
    digest = hashlib.sha256()
    for planned in plan.pairs.values():
        for place in (planned.a, planned.b):
            digest.update(_header(planned, place))
            digest.update(bytes_of(place.read()))
    return digest


def _header(planned: PlannedPair, place: Place) -> bytes:
    """`json.dumps([name, dtype, shape, repr(scale)])`, put together here, which takes a quarter of the time."""
    name, shape = json.dumps(planned.site.name), ", ".join(map(str, place.shape))
    return f'[{name}, "{place.dtype}", [{shape}], "{planned.scale!r}"]'.encode()
