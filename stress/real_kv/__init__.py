"""Keys and values of a real model, as a real engine stores them."""
