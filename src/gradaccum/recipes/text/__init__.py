"""Text for the language recipes: where it comes from, and how it becomes token ids."""
