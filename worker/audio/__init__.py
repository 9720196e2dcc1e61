"""Audio in and out: models that hear or speak, by mlx-audio, and their loop."""

__all__ = ["ask_audio", "audio_job", "audio_loop", "audio_model", "clip_queue", "sample_room", "sound_writer"]
