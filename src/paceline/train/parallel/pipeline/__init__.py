"""Pipeline parallelism: each rank has some of a model's blocks, and batches go through the ranks in microbatches."""
