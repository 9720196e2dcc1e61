"""Images, video and audio of a request, turned from references into bytes with a digest, within their bounds."""
