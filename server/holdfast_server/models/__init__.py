"""The tables.

Samples are columnar, one compressed chunk per batch and lineage; everything else is rows. Values that may be nan
or infinite, and values that are only read as a whole, are msgpack: SQLite turns nan into NULL.
"""

from __future__ import annotations

from holdfast_server.models.accounts import AuditEntry as AuditEntry
from holdfast_server.models.accounts import AuditHead as AuditHead
from holdfast_server.models.accounts import Membership as Membership
from holdfast_server.models.accounts import OidcFlow as OidcFlow
from holdfast_server.models.accounts import OneTimeLink as OneTimeLink
from holdfast_server.models.accounts import Person as Person
from holdfast_server.models.accounts import RateLimit as RateLimit
from holdfast_server.models.accounts import SharedSession as SharedSession
from holdfast_server.models.accounts import SignIn as SignIn
from holdfast_server.models.accounts import Token as Token
from holdfast_server.models.alerts import Alert as Alert
from holdfast_server.models.alerts import AlertChannel as AlertChannel
from holdfast_server.models.alerts import AlertDelivery as AlertDelivery
from holdfast_server.models.alerts import AlertRule as AlertRule
from holdfast_server.models.base import Base as Base
from holdfast_server.models.base import table as table
from holdfast_server.models.checkpoints import Checkpoint as Checkpoint
from holdfast_server.models.checkpoints import OrderTransition as OrderTransition
from holdfast_server.models.checkpoints import RestoreOrder as RestoreOrder
from holdfast_server.models.checkpoints import Verification as Verification
from holdfast_server.models.jobs import DEFAULT_PROJECT as DEFAULT_PROJECT
from holdfast_server.models.jobs import Attempt as Attempt
from holdfast_server.models.jobs import Job as Job
from holdfast_server.models.jobs import Lineage as Lineage
from holdfast_server.models.jobs import Project as Project
from holdfast_server.models.jobs import SettingsVersion as SettingsVersion
from holdfast_server.models.reports import Batch as Batch
from holdfast_server.models.reports import Chunk as Chunk
from holdfast_server.models.reports import Gap as Gap
from holdfast_server.models.reports import IntervalDecision as IntervalDecision
from holdfast_server.models.reports import Notice as Notice
from holdfast_server.models.reports import RankTotals as RankTotals
from holdfast_server.models.reports import Retention as Retention
from holdfast_server.models.reports import Rollup as Rollup
from holdfast_server.models.reports import SampleSeries as SampleSeries
from holdfast_server.models.reports import Stall as Stall
