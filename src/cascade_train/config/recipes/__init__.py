"""Configuration files of other trainers, translated into experiments."""
