"""One training script per framework, in the style of its own examples."""
