"""The engine under seeded requests, aborts, memory and disk faults, turn by turn."""
