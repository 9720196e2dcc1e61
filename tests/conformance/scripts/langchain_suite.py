"""LangChain's standard tests of chat models, for four of its packages. Run by pytest in their own environment."""

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["MLXD_URL"]
MODEL = "demo"


COMMON = {"base_url": URL, "api_key": "x", "model": MODEL, "temperature": 0, "max_tokens": 400}
# Usage of a stream is asked for by default at OpenAI's own address alone.
OPENAI = COMMON | {"base_url": f"{URL}/v1", "stream_usage": True}
RESPONSES = OPENAI | {"use_responses_api": True}
OLLAMA = {"base_url": URL, "model": MODEL, "temperature": 0, "num_predict": 400}


class _Suite(ChatModelIntegrationTests):
    # Pictures and PDFs of these tests come from the network, and the model that is asked takes text.
    supports_image_inputs = False
    supports_pdf_inputs = False


class TestChatOpenAI(_Suite):
    chat_model_class: type[BaseChatModel] = ChatOpenAI
    chat_model_params: dict[str, Any] = OPENAI


class TestChatOpenAIResponses(_Suite):
    chat_model_class: type[BaseChatModel] = ChatOpenAI
    chat_model_params: dict[str, Any] = RESPONSES


class TestChatAnthropic(_Suite):
    chat_model_class: type[BaseChatModel] = ChatAnthropic
    chat_model_params: dict[str, Any] = COMMON
    supports_anthropic_inputs = True


class TestChatOllama(_Suite):
    chat_model_class: type[BaseChatModel] = ChatOllama
    chat_model_params: dict[str, Any] = OLLAMA
    # Ollama's API has no such field.
    has_tool_choice = False
