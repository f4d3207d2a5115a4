"""Tests that other callbacks run while messages wait."""

import pytest

from tests.transport.conftest import Inbox
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import Goodbye
from tidegate.transport.router import FRAMES_PER_DRAIN, RouterSocket

pytestmark = pytest.mark.wire


async def test_no_batch_has_more_messages_than_the_loop_has_time_for(router: RouterSocket) -> None:
    dealer = DealerSocket(router.address, b"engine-0")
    for number in range(500):
        dealer.send(Goodbye(reason=str(number)))
    inbox = Inbox(router)
    try:
        await inbox.wait_for(500)
    finally:
        dealer.close()
    assert max(inbox.batch_sizes) <= FRAMES_PER_DRAIN
