"""Files <-> state: the layout of a job's folder, checkpoint shards, Hugging Face folders."""
