"""The JDK's HttpClient, which Java's agents and IDEs use, as it is. Needs a JDK."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.gateway.harness import DEADLINE_S, chat, running
from tests.support.scale import patient

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK")]

PROGRAM = Path(__file__).parent / "scripts" / "Offering.java"


async def test_a_body_behind_an_offer_of_http_2_arrives(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        process = await asyncio.create_subprocess_exec(
            "java", PROGRAM, f"{gateway.url}/v1/chat/completions", json.dumps(chat(max_tokens=2)),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(patient(DEADLINE_S)):
            said, _ = await process.communicate()

    lines = said.decode().splitlines()
    assert [line[:13] for line in lines] == ["200 HTTP_1_1 "] * 2, said
    assert all('"content":"t0 t1 "' in line for line in lines)
