"""A language model with sparse memory embeddings: backbone, memories, row tables, losses and tools."""
