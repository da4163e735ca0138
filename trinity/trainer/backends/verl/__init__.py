"""Training on veRL's own engines (fsdp, fsdp2), led by our loop and our loss."""
