"""Where rows come from, on the client's side: files, shards, task folders, the Hugging Face Hub."""
