"""How large a tier should be: what a model's tokens take, and what a size buys."""
