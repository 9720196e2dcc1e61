"""Images, video and audio: from the bytes of a request to features beside a prompt's text."""
