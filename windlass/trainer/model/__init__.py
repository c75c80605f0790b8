"""The model: its structure, its weights, LoRA and 4 bits, and how it is spread over ranks."""
