"""Pictures and tables in files of their own."""
