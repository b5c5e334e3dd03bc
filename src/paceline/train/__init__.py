"""What a training script calls: join the job, set up model and optimizer, feed, log, save, resume. Imports torch."""
