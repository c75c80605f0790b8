"""What is done with a trained model: it speaks, it is measured, and its card is written."""
