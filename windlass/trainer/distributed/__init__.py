"""Ranks among each other: who they are, how they agree, what the loss or the error of one means."""
