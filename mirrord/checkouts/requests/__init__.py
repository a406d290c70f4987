"""What a request gets: who may have it, which commit and layer it names, how much disk is left."""
