"""Markers for annotations of options: what an option means to resumes, caches and saved configurations.

`num_workers: Free[int]` in a constructor. They may be nested, and are read from source by config/static/roles.py.
"""

from typing import Annotated, TypeVar

T = TypeVar("T")

Free = Annotated[T, "free"]
"""Changes no sample and no number: a run may continue with another value, and a cache does not depend on it."""

Order = Annotated[T, "order"]
"""Chooses which samples come and when, not what is made of one: a cache does not depend on it."""

File = Annotated[T, "file"]
"""Names a file, a folder or a hub id: saved as an absolute path where it exists, held by a cache by its content."""
