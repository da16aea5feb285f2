"""Configuration files of other systems, brought here."""
