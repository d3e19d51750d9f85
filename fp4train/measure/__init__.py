"""What quantising costs a tensor: error metrics, and a probe that takes them inside a model that runs."""
