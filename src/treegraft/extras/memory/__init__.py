"""Published weights from memory to memory."""
