"""Parts of every dialect: decoding, constraints, reasoning, and the way of a generating request."""
