import asyncio

from tidegate.errors import BadFrame
from tidegate.orchestrator.outbox import Outbox
from tidegate.transport.messages import CancelTurn, Message


async def test_a_posted_message_that_cannot_be_sent_is_told_not_only_logged() -> None:
    sent: list[str] = []
    told: list[BaseException] = []

    def send(engine: str, message: Message) -> None:
        if engine == "broken":
            raise BadFrame("too large")
        sent.append(engine)

    outbox = Outbox(send, on_error=told.append)
    outbox.post("a", CancelTurn(turn=1))
    outbox.post("broken", CancelTurn(turn=2))
    await asyncio.sleep(0)
    assert sent == ["a"]
    assert [str(error) for error in told] == ["too large"]
