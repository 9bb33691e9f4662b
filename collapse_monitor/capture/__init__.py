"""Reading a running model: which modules attend, which are blocks, and what they computed."""
