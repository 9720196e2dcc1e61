"""Draft policy: how many tokens a step verifies, and whether drafts pay."""
