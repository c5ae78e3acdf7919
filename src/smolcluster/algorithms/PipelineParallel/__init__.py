"""PipelineParallel: the layers of one model spread over unequal machines."""
