"""What failed operations left, tried again."""
