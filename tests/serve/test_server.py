from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock, call

import pytest

pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from lopsided.serve.server import _Gathering


def test_head_and_body_of_an_answer_are_sent_together() -> None:
    async def write(transport: Any) -> None:
        gathering = _Gathering(transport, asyncio.get_running_loop())
        gathering.write(b"head")
        gathering.write(b"body")
        assert transport.mock_calls == []
        await asyncio.sleep(0)
        assert transport.mock_calls == [call.write(b"headbody")]
        gathering.write(b"more")
        await asyncio.sleep(0)

    transport = Mock(asyncio.Transport)
    asyncio.run(write(transport))
    assert transport.mock_calls == [call.write(b"headbody"), call.write(b"more")]


def test_what_was_written_is_sent_before_a_connection_closes() -> None:
    async def write(transport: Any) -> None:
        gathering = _Gathering(transport, asyncio.get_running_loop())
        gathering.write(b"last")
        gathering.close()
        await asyncio.sleep(0)

    transport = Mock(asyncio.Transport)
    asyncio.run(write(transport))
    assert transport.mock_calls == [call.write(b"last"), call.close()]
