"""Embeddings of texts and scores of pairs: models that read and generate nothing."""
