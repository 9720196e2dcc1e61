"""Endpoints of other servers, for their clients: llama.cpp, Ollama's lists, vLLM's scores and tokenizing."""
