"""Ray Serve's request router for adapters: applies `affinity.rank_replicas` to what Ray Serve knows of the replicas.

Which adapters a replica holds is what its `serve.multiplexed` function has reported, and, until that report has come, what
this router has just sent there. Named by `deploy/ray_serve`; runs inside each ingress.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.replicas.affinity import ReplicaView, rank_replicas
from deploy.replicas.call import Call

# A replica reports within a second or so; until then, what was sent to it counts.
SENT_SECONDS = 5.0


class AdapterRouter(MultiplexMixin, RequestRouter):
    """Sends an adapter's requests to replicas that hold it, and to others when those are busy."""

    def initialize_state(self, *, busy_at: int, **_: Any) -> None:
        """Called by Ray Serve with the keywords of `RequestRouterConfig`."""
        self._busy_at = busy_at
        # (adapter, replica) -> when it was last sent there
        self._sent: dict[tuple[str, str], float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, each a rank of its own; Ray Serve takes the first that has room."""
        call = _call_of(pending_request)
        if pending_request is not None:
            # Ray Serve waits between rounds only where a router says so; each round here tries everybody.
            pending_request.routing_context.should_backoff = True
        self._forget_sent()
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = rank_replicas(
            [self._view(name, replica, call.adapter) for name, replica in by_id.items()],
            adapter=call.adapter,
            busy_at=self._busy_at,
            prefer=call.prefer,
            avoid=call.avoid,
        )
        return [[by_id[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve once a replica has the request."""
        adapter = _call_of(pending_request).adapter
        if adapter is not None:
            key = adapter, replica_id.unique_id
            self._sent.pop(key, None)
            self._sent[key] = time.monotonic()

    def _view(self, name: str, replica: RunningReplica, adapter: str | None) -> ReplicaView:
        adapters = set(replica.multiplexed_model_ids)
        if adapter is not None and (adapter, name) in self._sent:
            adapters.add(adapter)
        return ReplicaView(name, self.replica_queue_len_cache.get(replica.replica_id) or 0, adapters)

    def _forget_sent(self) -> None:
        oldest = time.monotonic() - SENT_SECONDS
        while self._sent:  # In the order of their times.
            key = next(iter(self._sent))
            if self._sent[key] >= oldest:
                return
            del self._sent[key]


def _call_of(pending_request: PendingRequest | None) -> Call:
    """The request's `Call`; an empty one for other methods of the deployment."""
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, Call) else Call({})
