"""One file a memory, one protocol, one registry."""
