"""Sources of rows, read by the client: files, shards, task folders, the Hugging Face Hub."""
