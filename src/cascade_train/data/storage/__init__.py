"""Where bytes come from: local files, addresses and buckets."""
