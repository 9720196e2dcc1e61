"""Embeddings of texts and scores of pairs: models that generate nothing."""
