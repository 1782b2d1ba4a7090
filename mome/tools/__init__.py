"""Commands over run folders: python -m mome NAME."""
