"""LoRA and DoRA adapters."""
