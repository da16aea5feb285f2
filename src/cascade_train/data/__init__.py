"""Where samples come from: an index of the data, a plan of the order, and a loader of batches."""
