"""Pictures with captions: packing, buckets, the order of batches and the stream of them."""
