"""Embeddings of texts and scores of text pairs, by models that generate nothing."""
