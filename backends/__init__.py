"""What produces answers: the built-in engine, remote APIs, and the languages they speak."""
