"""The inbox: one order for everything that happens, and no waiting for ever."""

import threading
from collections import defaultdict

from peers import DEADLINE_S
from smolcluster.wire.inbox import Inbox, SessionClosed


def test_an_empty_inbox_is_none_after_the_timeout() -> None:
    assert Inbox().get(0.0) is None
    assert Inbox().get(0.01) is None


def test_each_threads_events_stay_in_order_and_none_is_lost() -> None:
    inbox = Inbox()

    def put_many(session_id: int) -> None:
        for number in range(200):
            inbox.put(SessionClosed(session_id, str(number)))

    threads = [threading.Thread(target=put_many, args=(session_id,)) for session_id in range(4)]
    for thread in threads:
        thread.start()
    seen = defaultdict(list)
    for _ in range(800):
        event = inbox.get(DEADLINE_S)
        assert isinstance(event, SessionClosed)
        seen[event.session_id].append(int(event.reason))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert seen == {session_id: list(range(200)) for session_id in range(4)}
