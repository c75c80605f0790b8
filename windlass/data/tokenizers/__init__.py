"""From text to token ids: tokenizers, chat templates, and the marks of what is trained on."""
