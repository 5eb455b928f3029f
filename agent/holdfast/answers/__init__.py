"""What a Holdfast server answers, as `holdfast.client` gives it.

A client may be older or newer than its server: what it does not know of is left out, what it misses has a default.
"""

from __future__ import annotations

from holdfast.answers.accounts import AuditEntry as AuditEntry
from holdfast.answers.accounts import NewToken as NewToken
from holdfast.answers.accounts import PersonRow as PersonRow
from holdfast.answers.accounts import TokenRow as TokenRow
from holdfast.answers.alerts import Alert as Alert
from holdfast.answers.alerts import AlertChannel as AlertChannel
from holdfast.answers.alerts import AlertDelivery as AlertDelivery
from holdfast.answers.alerts import AlertRule as AlertRule
from holdfast.answers.jobs import Change as Change
from holdfast.answers.jobs import CheckpointRow as CheckpointRow
from holdfast.answers.jobs import Edit as Edit
from holdfast.answers.jobs import Failing as Failing
from holdfast.answers.jobs import Family as Family
from holdfast.answers.jobs import Fleet as Fleet
from holdfast.answers.jobs import ForkRow as ForkRow
from holdfast.answers.jobs import ForkSource as ForkSource
from holdfast.answers.jobs import Job as Job
from holdfast.answers.jobs import JobNumbers as JobNumbers
from holdfast.answers.jobs import LongestStall as LongestStall
from holdfast.answers.jobs import NoticeRow as NoticeRow
from holdfast.answers.jobs import Order as Order
from holdfast.answers.jobs import TensorRow as TensorRow
from holdfast.answers.jobs import Tensors as Tensors
from holdfast.answers.jobs import Transition as Transition
from holdfast.answers.jobs import Verification as Verification
from holdfast.answers.questions import Goodput as Goodput
from holdfast.answers.questions import JobPlan as JobPlan
from holdfast.answers.questions import Kept as Kept
from holdfast.answers.questions import RankRow as RankRow
from holdfast.answers.questions import RankTimes as RankTimes
from holdfast.answers.questions import RestorePreview as RestorePreview
from holdfast.answers.questions import SettingsPreview as SettingsPreview
from holdfast.answers.questions import TimeBucket as TimeBucket
from holdfast.answers.timeline import AttemptRow as AttemptRow
from holdfast.answers.timeline import Band as Band
from holdfast.answers.timeline import GapRow as GapRow
from holdfast.answers.timeline import LineageRow as LineageRow
from holdfast.answers.timeline import Mean as Mean
from holdfast.answers.timeline import PacedRow as PacedRow
from holdfast.answers.timeline import Series as Series
from holdfast.answers.timeline import StallRow as StallRow
from holdfast.answers.timeline import Timeline as Timeline
