"""Small tools that every room may use."""
