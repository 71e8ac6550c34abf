"""Train any PyTorch Geometric model on graphs that do not fit a GPU, with historical embeddings."""
