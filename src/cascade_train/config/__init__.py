"""The configuration: typed schema, launch, preflight, and errors that read as one paragraph.

Nothing in this package imports torch: help, printing and every refusal answer at once.
"""
