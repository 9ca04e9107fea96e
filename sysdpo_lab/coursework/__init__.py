"""From the lessons' text sources to executed notebooks."""
