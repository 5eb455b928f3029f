"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.exact_fixtures import _one_thread as _one_thread
from tests.support.exact_fixtures import fork_server as fork_server
from tests.support.exact_fixtures import ranks as ranks
from tests.support.exact_fixtures import undisturbed as undisturbed
from tests.support.exact_fixtures import undisturbed_ranks as undisturbed_ranks
