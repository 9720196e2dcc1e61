"""Text from token ids: detokenizing, stop strings and parsers."""
