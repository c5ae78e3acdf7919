"""Meshes of equal machines on `torch.distributed`: data, sharded, tensor and pipeline parallel at once."""
