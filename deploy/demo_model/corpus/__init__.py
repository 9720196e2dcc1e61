"""Training data of the demo model: word lists, skills, and the generator that mixes them into conversations."""
