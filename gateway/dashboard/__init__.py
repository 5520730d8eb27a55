"""The dashboard: a page, its script and style, and the words for why an answer was found or not."""
