"""Recipe of the embedded demo model: data generator, tokenizer, training, evaluation."""
