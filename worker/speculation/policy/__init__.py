"""Draft policy: the number of tokens that a step verifies, and whether drafts make it faster."""
