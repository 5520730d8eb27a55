"""Text to vectors, and near vectors to a vector. Imports nothing of ours."""
