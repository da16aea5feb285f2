"""Networks of Stable Cascade, from diffusers or beside it."""
