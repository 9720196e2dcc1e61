"""One process per loaded model: tokenize, schedule, batch on MLX, detokenize, parse."""
