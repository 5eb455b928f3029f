"""The responses of a Holdfast server: the server encodes them, the pages render them, the client decodes them.

A field added by a later version has a default, so that its client decodes responses of an earlier server. Clients
ignore unknown fields.
"""

from __future__ import annotations

from holdfast.answers.administration import Alert as Alert
from holdfast.answers.administration import AlertChannel as AlertChannel
from holdfast.answers.administration import AlertDelivery as AlertDelivery
from holdfast.answers.administration import AlertRule as AlertRule
from holdfast.answers.administration import AuditEntry as AuditEntry
from holdfast.answers.administration import NewToken as NewToken
from holdfast.answers.administration import PersonRow as PersonRow
from holdfast.answers.administration import TokenRow as TokenRow
from holdfast.answers.jobs import BulkOutcome as BulkOutcome
from holdfast.answers.jobs import Change as Change
from holdfast.answers.jobs import CheckpointChanges as CheckpointChanges
from holdfast.answers.jobs import CheckpointRow as CheckpointRow
from holdfast.answers.jobs import DesiredChanges as DesiredChanges
from holdfast.answers.jobs import Edit as Edit
from holdfast.answers.jobs import Failing as Failing
from holdfast.answers.jobs import Family as Family
from holdfast.answers.jobs import Fleet as Fleet
from holdfast.answers.jobs import ForkRow as ForkRow
from holdfast.answers.jobs import ForkSource as ForkSource
from holdfast.answers.jobs import JobNumbers as JobNumbers
from holdfast.answers.jobs import JobStatus as JobStatus
from holdfast.answers.jobs import JobSummary as JobSummary
from holdfast.answers.jobs import LongestStall as LongestStall
from holdfast.answers.jobs import NoticeRow as NoticeRow
from holdfast.answers.jobs import NumberChanges as NumberChanges
from holdfast.answers.jobs import Order as Order
from holdfast.answers.jobs import TensorRow as TensorRow
from holdfast.answers.jobs import Tensors as Tensors
from holdfast.answers.jobs import Transition as Transition
from holdfast.answers.jobs import Verification as Verification
from holdfast.answers.jobs import VerificationState as VerificationState
from holdfast.answers.questions import Bucket as Bucket
from holdfast.answers.questions import CheckpointStory as CheckpointStory
from holdfast.answers.questions import Goodput as Goodput
from holdfast.answers.questions import JobPlan as JobPlan
from holdfast.answers.questions import Kept as Kept
from holdfast.answers.questions import Origin as Origin
from holdfast.answers.questions import RankRow as RankRow
from holdfast.answers.questions import RankTimes as RankTimes
from holdfast.answers.questions import RestorePreview as RestorePreview
from holdfast.answers.questions import RetentionChanges as RetentionChanges
from holdfast.answers.questions import SettingsPreview as SettingsPreview
from holdfast.answers.questions import TimeBucket as TimeBucket
from holdfast.answers.timeline import AttemptRow as AttemptRow
from holdfast.answers.timeline import Band as Band
from holdfast.answers.timeline import Density as Density
from holdfast.answers.timeline import GapRow as GapRow
from holdfast.answers.timeline import LineageRow as LineageRow
from holdfast.answers.timeline import Mean as Mean
from holdfast.answers.timeline import PacedRow as PacedRow
from holdfast.answers.timeline import Series as Series
from holdfast.answers.timeline import ShortWindow as ShortWindow
from holdfast.answers.timeline import StallDensity as StallDensity
from holdfast.answers.timeline import StallRow as StallRow
from holdfast.answers.timeline import StallsOverTime as StallsOverTime
from holdfast.answers.timeline import Timeline as Timeline
from holdfast.answers.timeline import Window as Window
