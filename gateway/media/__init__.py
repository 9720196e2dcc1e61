"""Images, video and audio of a request: references are turned into bytes with a digest, within limits."""
