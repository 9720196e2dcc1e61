"""Images, video and audio: from the bytes of a request to features for a prompt."""
