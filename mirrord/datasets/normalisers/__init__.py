"""One module per format: what its rows record, in the terms of the catalog."""
