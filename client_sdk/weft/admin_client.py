"""`AdminClient`: what an organisation's administrators ask. Audit log, usage by the hour, stored bytes."""

from __future__ import annotations

from datetime import date, datetime

from weft.future import APIFuture
from weft.rest_base import RestBase
from weft.wire.billing import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
)


class AdminClient(RestBase):
    """Every method returns a future at once. A key without the role is `PermissionDeniedError`."""

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> APIFuture[AuditLogResponse]:
        """What happened on `day` (today if None), midnight to midnight UTC."""
        when = None if day is None else day.isoformat()
        return self._get("/audit", AuditLogResponse, event_type=event_type, day=when)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Usage by the hour; both ends on the hour in UTC, at most 14 days apart. `RestClient.get_usage` is exact."""
        window = GetBillingUsageRequest.model_validate({"starting_on": starting_on, "ending_before": ending_before})
        return self._get("/billing/usage/events", BillingUsageResponse, **window.body())

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """How much the checkpoints take now, of everything or of one project."""
        route = "/billing/usage/checkpoints/current"
        return self._get(route, CurrentCheckpointStorageUsageResponse, project_id=project_id)
