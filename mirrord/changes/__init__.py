"""What a live checkout has over its base: listed, and copied into layers."""
