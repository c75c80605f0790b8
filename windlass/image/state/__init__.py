"""What is installed after each step, by a real resolver."""
