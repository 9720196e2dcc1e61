"""Endpoints of other servers, for their clients: LM Studio, llama.cpp, Ollama's lists, vLLM's scores and tokenizing."""
