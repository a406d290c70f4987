"""What a dataset's rows lack and can be computed, by rules that have names."""
