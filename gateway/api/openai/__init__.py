"""OpenAI's dialect: chat and text completions, embeddings, audio."""
