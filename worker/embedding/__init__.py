"""Embeddings of texts and scores of pairs: models that read and generate nothing."""

__all__ = ["job_loop", "load_model", "prepare"]
