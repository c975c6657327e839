"""What is trained how: settings, and the groups of a model."""
