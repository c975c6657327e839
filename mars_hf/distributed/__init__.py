"""Where the pieces of a parameter live, and how ranks share what a step needs of whole ones."""
