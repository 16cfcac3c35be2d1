"""Settings of a recipe: where they are declared, loaded and checked."""
