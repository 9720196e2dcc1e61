"""Files of models: the Hugging Face hub, its cache, downloads and metadata."""
