"""Endpoints that other servers' clients know: LM Studio, llama.cpp, Ollama's lists, vLLM's scores and tokenizing."""
