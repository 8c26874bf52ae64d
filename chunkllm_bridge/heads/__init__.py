"""Draft heads for a model, trained on what the model itself says: `chunkllm heads`."""
