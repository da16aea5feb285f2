"""Which sample comes when: a pure function of seed and epoch."""
