"""Recipe of demo-vision: rendered pictures, questions about them, training and evaluation."""
