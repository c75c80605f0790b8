"""Container images: planned from facts, built, proven inside, pushed by digest."""
