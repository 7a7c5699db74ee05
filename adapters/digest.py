"""The hash that names an adapter's content: one a tensor, so that threads can share the work, and one over those.

It follows the stored bytes, types, shapes, layers and effective scales, and nothing else: not the files' layout, names or
number, nor the threads. Called by `weights`, also for the hash that earlier versions of this program computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from adapters.plan import AdapterPlan, PlannedPair
from adapters.slab import Half, Place

_FORMAT = b"switchboard adapter content 2\n"


def content_hash(halves: Iterable[tuple[PlannedPair, Half]]) -> hashlib._Hash:
    """sha256 over what `read_slab` has filled in, in the plan's order, A before B."""
    digest = hashlib.sha256(_FORMAT)
    for planned, half in halves:
        digest.update(_header(planned, half.place))
        digest.update(half.tensor_hash)
    return digest


def first_format_hash(plan: AdapterPlan) -> hashlib._Hash:
    """What the first format gave: one hash over everything, in order. Catalogues of that time hold it; reads the files."""
    digest = hashlib.sha256()
    for planned in plan.pairs.values():
        for place in (planned.a, planned.b):
            digest.update(_header(planned, place))
            digest.update(place.file.read(place.entry)[1])
    return digest


def _header(planned: PlannedPair, place: Place) -> bytes:
    return json.dumps([planned.site.name, place.dtype, place.shape, repr(planned.scale)]).encode()
