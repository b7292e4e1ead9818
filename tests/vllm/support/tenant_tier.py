"""A tier of vLLM's kind that keeps each tenant's blocks apart, and notes what it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, RequestOffloadingContext

from tests.vllm.support.scripted_tier import ScriptedTier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob


class TenantTier(ScriptedTier):
    """The tenant stands in the request's ``kv_transfer_params``. It wants whole requests.

    With ``computed_only`` beside the tenant, it wants what the request itself computes.
    """

    last: ClassVar[TenantTier]

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.told: list[tuple[str, str]] = []  #: request and what was called for it
        self.stored: dict[str, list[bytes]] = {}  #: by request
        self.asked: list[tuple[str, bytes]] = []
        self.of_tenant: dict[str, dict[bytes, bytes]] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        super().on_new_request(req_context)
        self.told.append((req_context.req_id, "began"))
        if (req_context.kv_transfer_params or {}).get("computed_only"):
            return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        self.told.append((req_context.req_id, "ended"))

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        self.asked.append((req_context.req_id, key))
        self._enter(req_context)
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._enter(job_metadata.req_context)
        request = job_metadata.req_context.req_id
        assert request in self.requests, "a store of a request that is over"
        self.stored.setdefault(request, []).extend(job_metadata.keys)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._enter(job_metadata.req_context)
        super().submit_load(job_metadata)

    def _enter(self, req_context: ReqContext) -> None:
        assert req_context.kv_transfer_params is not None
        self.blocks = self.of_tenant.setdefault(req_context.kv_transfer_params["tenant"], {})


class ServingTier(ScriptedTier):
    """Serves other engines, as vLLM's ``p2p`` does."""

    def serve_external_requests(self, parent: object) -> None:
        pass
