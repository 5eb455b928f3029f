"""How long an agent waits before it asks a server again."""

from holdfast.server_link.http_client import MAX_BACKOFF_SECONDS, Backoff


def test_waits_grow_beyond_what_the_server_asked_for_while_it_still_refuses():
    backoff = Backoff()
    waits = [backoff.next_seconds(2.0) for _ in range(40)]
    assert all(2.0 <= wait <= 2.2 for wait in waits[:2])
    assert max(waits) <= 2.0 + MAX_BACKOFF_SECONDS
    assert sum(waits[20:]) / 20 > 2 * max(waits[:5])
    backoff.reset()
    assert 2.0 <= backoff.next_seconds(2.0) <= 2.2
