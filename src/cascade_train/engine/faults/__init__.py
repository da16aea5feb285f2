"""What ends or interrupts a run: bad steps, stops, unreadable samples."""
