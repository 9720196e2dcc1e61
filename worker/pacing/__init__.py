"""Pacing of the step loop: chunks of prefill by measured time, what is known of it from before, and rests."""

__all__ = ["kept_file", "kept_load", "pacer", "rests"]
