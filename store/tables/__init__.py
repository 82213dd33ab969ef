"""Every table of Weft: ids, states, hashes and money. Bodies, results and weights are blobs (`store.blobs.contract`).

Every row that belongs to a tenant carries `org_id`, and every lookup is scoped by it. Money is integer nano-dollars.
Timestamps are UTC and come back timezone-aware.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from store.tables.base import Base, BigInt, Utc
from store.tables.console import BrowserSession, LoginLink, RunCurve, RunMetric
from store.tables.money import (
    Budget,
    BudgetAlert,
    BudgetPeriod,
    CreditGrant,
    LedgerEntry,
    StorageSpan,
    UsageEvent,
    UsageHour,
    Wallet,
    WalletDefault,
)
from store.tables.payments import (
    LEADS,
    LEADS_S,
    Alert,
    Invoice,
    JobLease,
    JobRun,
    StripeMeterCursor,
    StripeOutbox,
    StripeWebhookEvent,
)
from store.tables.people import ApiKey, AuditEntry, Identity, Invitation, Membership, Organisation, Project, User
from store.tables.work import LOADS, SAMPLES, Checkpoint, Operation, Run, Sampler, Session, SessionTurn
