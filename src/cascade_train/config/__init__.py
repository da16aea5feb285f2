"""The configuration: typed schema, launch, preflight, and errors that read as one paragraph.

No module of this package imports torch: help, printing and refusals of typed nodes answer at once. Preflight imports
the components that a configuration names.
"""
