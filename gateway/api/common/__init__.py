"""Parts that every dialect uses: decoding, constraints, reasoning, and the steps of a generating request."""
