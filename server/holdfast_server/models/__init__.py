"""The tables.

Samples are columnar, one compressed chunk per batch and lineage; everything else is rows. Values that may be nan
or infinite, and values that are only read as a whole, are msgpack: SQLite turns nan into NULL.
"""

from __future__ import annotations

from holdfast_server.models.account import AccountGroupRecord as AccountGroupRecord
from holdfast_server.models.account import AccountJobRecord as AccountJobRecord
from holdfast_server.models.account import AccountPeriodRecord as AccountPeriodRecord
from holdfast_server.models.accounts import AuditEntryRecord as AuditEntryRecord
from holdfast_server.models.accounts import AuditHeadRecord as AuditHeadRecord
from holdfast_server.models.accounts import MembershipRecord as MembershipRecord
from holdfast_server.models.accounts import OidcFlowRecord as OidcFlowRecord
from holdfast_server.models.accounts import OneTimeLinkRecord as OneTimeLinkRecord
from holdfast_server.models.accounts import PersonRecord as PersonRecord
from holdfast_server.models.accounts import RateLimitRecord as RateLimitRecord
from holdfast_server.models.accounts import SavedViewRecord as SavedViewRecord
from holdfast_server.models.accounts import ServerAddressRecord as ServerAddressRecord
from holdfast_server.models.accounts import SharedSessionRecord as SharedSessionRecord
from holdfast_server.models.accounts import SignInRecord as SignInRecord
from holdfast_server.models.accounts import TokenRecord as TokenRecord
from holdfast_server.models.alerts import AlertChannelRecord as AlertChannelRecord
from holdfast_server.models.alerts import AlertDeliveryRecord as AlertDeliveryRecord
from holdfast_server.models.alerts import AlertNoteRecord as AlertNoteRecord
from holdfast_server.models.alerts import AlertRecord as AlertRecord
from holdfast_server.models.alerts import AlertRuleRecord as AlertRuleRecord
from holdfast_server.models.base import Base as Base
from holdfast_server.models.base import table as table
from holdfast_server.models.checkpoints import CheckpointRecord as CheckpointRecord
from holdfast_server.models.checkpoints import OrderTransitionRecord as OrderTransitionRecord
from holdfast_server.models.checkpoints import RestoreOrderRecord as RestoreOrderRecord
from holdfast_server.models.checkpoints import VerificationRecord as VerificationRecord
from holdfast_server.models.jobs import DEFAULT_PROJECT as DEFAULT_PROJECT
from holdfast_server.models.jobs import ApprovalRecord as ApprovalRecord
from holdfast_server.models.jobs import AttemptConfigurationRecord as AttemptConfigurationRecord
from holdfast_server.models.jobs import AttemptRecord as AttemptRecord
from holdfast_server.models.jobs import HostMemoryRecord as HostMemoryRecord
from holdfast_server.models.jobs import JobRecord as JobRecord
from holdfast_server.models.jobs import LineageRecord as LineageRecord
from holdfast_server.models.jobs import OutputRecord as OutputRecord
from holdfast_server.models.jobs import ProjectRecord as ProjectRecord
from holdfast_server.models.jobs import RankPlaceRecord as RankPlaceRecord
from holdfast_server.models.jobs import SettingsVersionRecord as SettingsVersionRecord
from holdfast_server.models.reports import AnnotationRecord as AnnotationRecord
from holdfast_server.models.reports import BatchRecord as BatchRecord
from holdfast_server.models.reports import ChunkRecord as ChunkRecord
from holdfast_server.models.reports import GapRecord as GapRecord
from holdfast_server.models.reports import IntervalDecisionRecord as IntervalDecisionRecord
from holdfast_server.models.reports import NoticeRecord as NoticeRecord
from holdfast_server.models.reports import RankTotalsRecord as RankTotalsRecord
from holdfast_server.models.reports import RetentionRecord as RetentionRecord
from holdfast_server.models.reports import RollupRecord as RollupRecord
from holdfast_server.models.reports import SampleSeriesRecord as SampleSeriesRecord
from holdfast_server.models.reports import StallRecord as StallRecord
from holdfast_server.models.reports import TrainingPauseRecord as TrainingPauseRecord
from holdfast_server.models.stores import StoreDiskRecord as StoreDiskRecord
from holdfast_server.models.stores import StoreLimitRecord as StoreLimitRecord
from holdfast_server.models.stores import StoreRecord as StoreRecord
from holdfast_server.models.stores import StoreWriterRecord as StoreWriterRecord
from holdfast_server.models.values import JobValueRecord as JobValueRecord
from holdfast_server.models.values import ValueChangeRecord as ValueChangeRecord
