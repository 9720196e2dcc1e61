"""Files of models: the Hugging Face hub, its cache, downloads and metadata."""

__all__ = [
    "adapter_sizes",
    "download",
    "facts",
    "hub",
    "hub_cache",
    "known_times",
    "listing",
    "metadata",
    "search",
    "served_form",
    "worker_memory",
]
