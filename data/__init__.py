"""Token shards, the loader, tokenizers and corpora. Nothing here knows a model."""
