"""Images, video and audio of a request: from what its client sent to bytes with a digest, within their bounds."""
