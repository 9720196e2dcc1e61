"""Agent libraries from PyPI: each calls a tool and tells what came of it, in one piece and streamed, over each API."""

from pathlib import Path

import pytest

from tests.clients.conftest import Workshop
from tests.clients.install import pypi

pytestmark = pytest.mark.anyio

SCRIPTS = Path(__file__).parent / "scripts"
AGENTS = (
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "openai-agents==0.24.0",
    "langchain-openai==1.7.3",
    "langchain-anthropic==1.7.7",
    "smolagents[openai]==1.26.0",
)
LITELLM = ("litellm==1.106.2", "mcp")


@pytest.mark.parametrize(
    ("library", "api"),
    [
        ("pydantic_ai", "chat"),
        ("pydantic_ai", "responses"),
        ("pydantic_ai", "anthropic"),
        ("openai_agents", "chat"),
        ("openai_agents", "responses"),
        ("langchain", "chat"),
        ("langchain", "responses"),
        ("langchain", "anthropic"),
        ("smolagents", "chat"),
        ("litellm", "openai"),
        ("litellm", "anthropic"),
    ],
)
async def test_a_library(workshop: Workshop, library: str, api: str) -> None:
    commands = pypi("litellm", *LITELLM) if library == "litellm" else pypi("pyagents", *AGENTS)
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    said = await workshop.run([commands / "python", SCRIPTS / f"with_{library}.py", workshop.url, api], env)

    plain, _, streamed = said.partition("streamed")
    assert workshop.secret in plain, said
    assert workshop.secret in streamed, said
